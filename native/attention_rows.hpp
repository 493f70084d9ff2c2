// Rows of a cache as vectors of float32, for each type; included by attention_kernel.hpp, which see.
#pragma once

#include "attention_task.hpp"

// What is indexed by such a loop can stay in registers.
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

// What is called for each few keys: as functions of their own, these cost a tenth of the kernel's time.
#define INLINE inline __attribute__((always_inline))

namespace {

using hybrid::block_tokens;
using hybrid::RowType;
using std::int64_t;
using Reg = Vec::Reg;

constexpr int W = Vec::width;

// More would only make the compiler work longer.
constexpr int at_most_4(int n) {
    return n < 4 ? n : 4;
}

// read: vectors i … i + N - 1 of a row. `line` vectors lie in one cache line.
template <RowType> struct Reader;

template <> struct Reader<RowType::f32> {
    static constexpr int line = at_most_4(16 / W);
    static constexpr int64_t offset(int64_t i) { return 4 * i; }
    template <int N> static void read(const char* row, int i, Reg (&x)[N]) {
        UNROLL
        for (int j = 0; j < N; ++j)
            x[j] = Vec::load(reinterpret_cast<const float*>(row) + (i + j) * W);
    }
};

template <> struct Reader<RowType::f16> {
    static constexpr int line = at_most_4(32 / W);
    static constexpr int64_t offset(int64_t i) { return 2 * i; }
    template <int N> static void read(const char* row, int i, Reg (&x)[N]) {
        UNROLL
        for (int j = 0; j < N; ++j)
            x[j] = Vec::load_f16(row + 2 * (i + j) * W);
    }
};

template <> struct Reader<RowType::bf16> {
    static constexpr int line = at_most_4(32 / W);
    static constexpr int64_t offset(int64_t i) { return 2 * i; }
    template <int N> static void read(const char* row, int i, Reg (&x)[N]) {
        UNROLL
        for (int j = 0; j < N; ++j)
            x[j] = Vec::load_bf16(row + 2 * (i + j) * W);
    }
};

// Blocks of a float16 scale and 32 signed bytes. N vectors are part of a block or whole blocks.
template <> struct Reader<RowType::q8_0> {
    static constexpr int line = at_most_4(32 / W);
    static constexpr int64_t offset(int64_t i) { return i / 32 * 34; }
    template <int N> static void read(const char* row, int i, Reg (&x)[N]) {
        Reg d = Vec::zero();
        UNROLL
        for (int j = 0; j < N; ++j) {
            const int at = (i + j) * W, b = at / 32;
            if (j == 0 || j * W % 32 == 0)
                d = Vec::all_f16(row + b * 34);
            x[j] = Vec::mul(Vec::load_i8(row + b * 34 + 2 + at % 32), d);
        }
    }
};

} // namespace

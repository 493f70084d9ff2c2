// Vectors of plain floats, for processors without an instruction set of their own here and for head
// dimensions that fill no vector of another width. The includer defines LANES.
#pragma once

namespace {

struct Vec {
    struct Reg {
        float x[LANES];
    };
    static constexpr int width = LANES;
    static constexpr int keys(int heads) { return heads == 1 ? 4 : 2; }
    static constexpr int columns(int heads) { return heads == 1 ? 4 : 2; }

    template <class F> static Reg each(F f) {
        Reg out;
        for (int i = 0; i < width; ++i)
            out.x[i] = f(i);
        return out;
    }

    static Reg all(float x) {
        return each([=](int) { return x; });
    }
    static Reg zero() { return all(0.0F); }
    static Reg load(const float* at) {
        return each([=](int i) { return at[i]; });
    }
    static void store(float* at, Reg a) {
        for (int i = 0; i < width; ++i)
            at[i] = a.x[i];
    }
    static Reg load_f16(const char* at) {
        return each([=](int i) { return from_f16(bits16(at + 2 * i)); });
    }
    static Reg all_f16(const char* at) { return all(from_f16(bits16(at))); }
    static Reg load_bf16(const char* at) {
        return each([=](int i) { return from_bits(std::uint32_t(bits16(at + 2 * i)) << 16); });
    }
    static Reg load_i8(const char* at) {
        return each([=](int i) { return float(static_cast<signed char>(at[i])); });
    }

    static Reg add(Reg a, Reg b) {
        return each([&](int i) { return a.x[i] + b.x[i]; });
    }
    static Reg sub(Reg a, Reg b) {
        return each([&](int i) { return a.x[i] - b.x[i]; });
    }
    static Reg mul(Reg a, Reg b) {
        return each([&](int i) { return a.x[i] * b.x[i]; });
    }
    static Reg div(Reg a, Reg b) {
        return each([&](int i) { return a.x[i] / b.x[i]; });
    }
    static Reg fma(Reg a, Reg b, Reg c) {
        return each([&](int i) { return a.x[i] * b.x[i] + c.x[i]; });
    }
    static Reg min(Reg a, Reg b) {
        return each([&](int i) { return a.x[i] < b.x[i] ? a.x[i] : b.x[i]; });
    }
    static Reg max(Reg a, Reg b) { // b where either is NaN
        return each([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; });
    }
    static Reg pow2(Reg n) {
        // NaN has no integer; it stays in the other factor.
        return each([&](int i) {
            return from_bits(std::uint32_t((n.x[i] > -127.0F && n.x[i] < 128.0F ? int(n.x[i]) : 0) + 127)
                             << 23);
        });
    }
    static bool any_greater(Reg a, Reg b) {
        bool any = false;
        for (int i = 0; i < width; ++i)
            any |= a.x[i] > b.x[i];
        return any;
    }
    static float highest(Reg a) {
        float top = a.x[0];
        for (int i = 1; i < width; ++i)
            top = a.x[i] > top ? a.x[i] : top;
        return top;
    }
    static Reg zero_where_less(Reg a, Reg limit, Reg y) {
        return each([&](int i) { return a.x[i] < limit.x[i] ? 0.0F : y.x[i]; });
    }
    static Reg copy_where_less(Reg a, Reg limit, Reg y) {
        return each([&](int i) { return a.x[i] < limit.x[i] ? a.x[i] : y.x[i]; });
    }
    template <int R, int N> static void sums(const Reg (&acc)[R][N], float* s) {
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < N; ++t) {
                float sum = 0.0F;
                for (float x : acc[r][t].x)
                    sum += x;
                s[r * hybrid::block_tokens + t] = sum;
            }
    }

  private:
    static std::uint16_t bits16(const char* at) {
        std::uint16_t bits;
        __builtin_memcpy(&bits, at, 2);
        return bits;
    }
    static float from_bits(std::uint32_t bits) {
        float x;
        __builtin_memcpy(&x, &bits, 4);
        return x;
    }
    static float from_f16(std::uint16_t half) {
        // Exponent and mantissa at float32's place are the value times 2^-112, subnormal or not.
        const float size = from_bits(std::uint32_t(half & 0x7fff) << 13) * 0x1p112F;
        const bool finite = (half & 0x7c00) != 0x7c00;
        const float value = finite ? size : from_bits(0x7f800000 | std::uint32_t(half & 0x3ff) << 13);
        return half & 0x8000 ? -value : value;
    }
};

} // namespace

// The attention kernel for AVX-512. Compiled with its own flags; called only where the processor has it.
#include "attention_task.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include <immintrin.h>

namespace {

struct Vec {
    using Reg = __m512;
    static constexpr int width = 16;
    static constexpr int keys(int heads) { return heads <= 2 ? 8 : 4; }
    static constexpr int columns(int heads) { return heads <= 2 ? 8 : 4; }

    static Reg zero() { return _mm512_setzero_ps(); }
    static Reg all(float x) { return _mm512_set1_ps(x); }
    static Reg load(const float* at) { return _mm512_loadu_ps(at); }
    static void store(float* at, Reg x) { _mm512_storeu_ps(at, x); }
    static Reg load_f16(const char* at) { return _mm512_cvtph_ps(bits256(at)); }
    static Reg all_f16(const char* at) {
        std::int16_t bits;
        __builtin_memcpy(&bits, at, 2);
        return _mm512_cvtph_ps(_mm256_set1_epi16(bits));
    }
    static Reg load_bf16(const char* at) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits256(at)), 16));
    }
    static Reg load_i8(const char* at) {
        return _mm512_cvtepi32_ps(
            _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
    }

    static Reg add(Reg a, Reg b) { return _mm512_add_ps(a, b); }
    static Reg sub(Reg a, Reg b) { return _mm512_sub_ps(a, b); }
    static Reg mul(Reg a, Reg b) { return _mm512_mul_ps(a, b); }
    static Reg div(Reg a, Reg b) { return _mm512_div_ps(a, b); }
    static Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
    static Reg min(Reg a, Reg b) { return _mm512_min_ps(a, b); }
    static Reg max(Reg a, Reg b) { return _mm512_max_ps(a, b); } // b where either is NaN
    static Reg pow2(Reg n) {
        return _mm512_castsi512_ps(
            _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
    }
    static bool any_greater(Reg a, Reg b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
    static float highest(Reg x) { return _mm512_reduce_max_ps(x); }
    static Reg zero_where_less(Reg x, Reg limit, Reg y) {
        return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), y);
    }
    // x where it is less than the limit, y elsewhere.
    static Reg copy_where_less(Reg x, Reg limit, Reg y) {
        return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), x);
    }

    template <int R, int N> static void sums(const Reg (&acc)[R][N], float* s) {
        if constexpr (R == 4 && N == 4) {
            const Reg a = quarters(acc[0]), b = quarters(acc[1]), c = quarters(acc[2]), d = quarters(acc[3]);
            const Reg ab = add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
            const Reg cd = add(_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xdd));
            const Reg x = add(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
            _mm_storeu_ps(s, _mm512_castps512_ps128(x));
            _mm_storeu_ps(s + stride, _mm512_extractf32x4_ps(x, 1));
            _mm_storeu_ps(s + 2 * stride, _mm512_extractf32x4_ps(x, 2));
            _mm_storeu_ps(s + 3 * stride, _mm512_extractf32x4_ps(x, 3));
        } else if constexpr (N % 4 == 0) {
            for (int r = 0; r < R; ++r)
                for (int t = 0; t < N; t += 4) {
                    const Reg x = quarters(acc[r] + t);
                    const __m256 half =
                        _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
                    _mm_storeu_ps(s + r * stride + t,
                                  _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
                }
        } else {
            for (int r = 0; r < R; ++r)
                for (int t = 0; t < N; ++t)
                    s[r * stride + t] = _mm512_reduce_add_ps(acc[r][t]);
        }
    }

  private:
    static constexpr int stride = hybrid::block_tokens;

    static __m256i bits256(const char* at) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    }

    // Four vectors to one: each 128-bit lane holds that lane's sums of the four.
    static Reg quarters(const Reg* x) {
        const Reg a = add(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
        const Reg b = add(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
        return add(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    }
};

} // namespace

#include "attention_kernel.hpp"

hybrid::Kernel hybrid::avx512_kernel(const Rows& k, const Rows& v) {
    return find_kernel(k, v);
}
#else
hybrid::Kernel hybrid::avx512_kernel(const Rows&, const Rows&) {
    return nullptr;
}
#endif

// The attention kernel for AVX2 with FMA and F16C. Compiled with its own flags; called only where the
// processor has them.
#include "attention_task.hpp"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

namespace {

struct Vec {
    using Reg = __m256;
    static constexpr int width = 8;
    static constexpr int keys(int heads) { return heads <= 3 ? 4 : 2; }
    static constexpr int columns(int heads) { return heads == 1 ? 8 : heads == 2 ? 4 : 2; }

    static Reg zero() { return _mm256_setzero_ps(); }
    static Reg all(float x) { return _mm256_set1_ps(x); }
    static Reg load(const float* at) { return _mm256_loadu_ps(at); }
    static void store(float* at, Reg x) { _mm256_storeu_ps(at, x); }
    static Reg load_f16(const char* at) { return _mm256_cvtph_ps(bits128(at)); }
    static Reg all_f16(const char* at) {
        std::int16_t bits;
        __builtin_memcpy(&bits, at, 2);
        return _mm256_cvtph_ps(_mm_set1_epi16(bits));
    }
    static Reg load_bf16(const char* at) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits128(at)), 16));
    }
    static Reg load_i8(const char* at) {
        return _mm256_cvtepi32_ps(
            _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
    }

    static Reg add(Reg a, Reg b) { return _mm256_add_ps(a, b); }
    static Reg sub(Reg a, Reg b) { return _mm256_sub_ps(a, b); }
    static Reg mul(Reg a, Reg b) { return _mm256_mul_ps(a, b); }
    static Reg div(Reg a, Reg b) { return _mm256_div_ps(a, b); }
    static Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
    static Reg min(Reg a, Reg b) { return _mm256_min_ps(a, b); }
    static Reg max(Reg a, Reg b) { return _mm256_max_ps(a, b); } // b where either is NaN
    static Reg pow2(Reg n) {
        return _mm256_castsi256_ps(
            _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
    }
    static bool any_greater(Reg a, Reg b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0; }
    static float highest(Reg x) {
        __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        m = _mm_max_ps(m, _mm_movehl_ps(m, m));
        return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
    }
    static Reg zero_where_less(Reg x, Reg limit, Reg y) {
        return _mm256_and_ps(_mm256_cmp_ps(x, limit, _CMP_NLT_UQ), y);
    }
    // x where it is less than the limit, y elsewhere.
    static Reg copy_where_less(Reg x, Reg limit, Reg y) {
        return _mm256_blendv_ps(y, x, _mm256_cmp_ps(x, limit, _CMP_LT_OQ));
    }

    template <int R, int N> static void sums(const Reg (&acc)[R][N], float* s) {
        if constexpr (N % 4 == 0) {
            for (int r = 0; r < R; ++r)
                for (int t = 0; t < N; t += 4)
                    _mm_storeu_ps(s + r * stride + t,
                                  four(acc[r][t], acc[r][t + 1], acc[r][t + 2], acc[r][t + 3]));
        } else if constexpr (N == 2 && R % 2 == 0) {
            for (int r = 0; r < R; r += 2) {
                const __m128 x = four(acc[r][0], acc[r][1], acc[r + 1][0], acc[r + 1][1]);
                _mm_storel_pi(reinterpret_cast<__m64*>(s + r * stride), x);
                _mm_storeh_pi(reinterpret_cast<__m64*>(s + (r + 1) * stride), x);
            }
        } else {
            for (int r = 0; r < R; ++r)
                for (int t = 0; t < N; ++t)
                    s[r * stride + t] = _mm_cvtss_f32(four(acc[r][t], zero(), zero(), zero()));
        }
    }

  private:
    static constexpr int stride = hybrid::block_tokens;

    static __m128i bits128(const char* at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)); }

    // The sums of four vectors.
    static __m128 four(Reg a, Reg b, Reg c, Reg d) {
        const Reg x = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
        return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    }
};

} // namespace

#include "attention_kernel.hpp"

hybrid::Kernel hybrid::avx2_kernel(const Rows& k, const Rows& v) {
    return find_kernel(k, v);
}
#else
hybrid::Kernel hybrid::avx2_kernel(const Rows&, const Rows&) {
    return nullptr;
}
#endif

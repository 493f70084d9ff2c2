// The attention kernel for NEON, which every 64-bit ARM processor has.
#include "attention_task.hpp"

#if defined(__aarch64__)
#include <arm_neon.h>

namespace {

struct Vec {
    using Reg = float32x4_t;
    static constexpr int width = 4;
    static constexpr int keys(int heads) { return heads <= 3 ? 4 : 2; }
    static constexpr int columns(int heads) { return heads <= 2 ? 8 : 4; }

    static Reg zero() { return vdupq_n_f32(0.0F); }
    static Reg all(float x) { return vdupq_n_f32(x); }
    static Reg load(const float* at) { return vld1q_f32(at); }
    static void store(float* at, Reg x) { vst1q_f32(at, x); }
    static Reg load_f16(const char* at) { return vcvt_f32_f16(vreinterpret_f16_u16(bits16(at))); }
    static Reg all_f16(const char* at) {
        std::uint16_t bits;
        __builtin_memcpy(&bits, at, 2);
        return vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(bits)));
    }
    static Reg load_bf16(const char* at) { return vreinterpretq_f32_u32(vshll_n_u16(bits16(at), 16)); }
    static Reg load_i8(const char* at) {
        std::uint32_t bits;
        __builtin_memcpy(&bits, at, 4);
        const int16x8_t wide = vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(bits)));
        return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
    }

    static Reg add(Reg a, Reg b) { return vaddq_f32(a, b); }
    static Reg sub(Reg a, Reg b) { return vsubq_f32(a, b); }
    static Reg mul(Reg a, Reg b) { return vmulq_f32(a, b); }
    static Reg div(Reg a, Reg b) { return vdivq_f32(a, b); }
    static Reg fma(Reg a, Reg b, Reg c) { return vfmaq_f32(c, a, b); }
    static Reg min(Reg a, Reg b) { return vminq_f32(a, b); }
    static Reg max(Reg a, Reg b) { return vbslq_f32(vcgtq_f32(a, b), a, b); } // b where either is NaN
    static Reg pow2(Reg n) {
        return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
    }
    static bool any_greater(Reg a, Reg b) { return vmaxvq_u32(vcgtq_f32(a, b)) != 0; }
    static float highest(Reg x) { return vmaxvq_f32(x); }
    static Reg zero_where_less(Reg x, Reg limit, Reg y) {
        return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(y), vcltq_f32(x, limit)));
    }
    // x where it is less than the limit, y elsewhere.
    static Reg copy_where_less(Reg x, Reg limit, Reg y) { return vbslq_f32(vcltq_f32(x, limit), x, y); }

    template <int R, int N> static void sums(const Reg (&acc)[R][N], float* s) {
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < N; ++t)
                s[r * hybrid::block_tokens + t] = vaddvq_f32(acc[r][t]);
    }

  private:
    static uint16x4_t bits16(const char* at) {
        uint16x4_t bits;
        __builtin_memcpy(&bits, at, 8);
        return bits;
    }
};

} // namespace

#include "attention_kernel.hpp"

hybrid::Kernel hybrid::neon_kernel(const Rows& k, const Rows& v) {
    return find_kernel(k, v);
}
#else
hybrid::Kernel hybrid::neon_kernel(const Rows&, const Rows&) {
    return nullptr;
}
#endif

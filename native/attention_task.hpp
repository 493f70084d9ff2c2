// What the attention kernel of one instruction set is given: plain data only. The kernels' files are compiled
// with flags of their own, so nothing with inline code that other files share may be included here.
#pragma once

#include <cstdint>

namespace hybrid {

enum class RowType { f32, f16, bf16, q8_0 };

// K or V of one sequence: [n_slots, n_kv_heads, dim] values, the strides in bytes, a head's values
// contiguous.
struct Rows {
    const char* data;
    std::int64_t slot_stride;
    std::int64_t head_stride;
    RowType type;
    int dim;
};

// Floats of the widest vector: partial sums take as much room on every instruction set.
constexpr int widest_vector = 16;

// Keys attended to at a time.
constexpr int block_tokens = 32;

// Consecutive queries of one sequence against the keys at positions lo … hi - 1, for some of the KV heads.
struct Task {
    const float* q; // [n, n_heads, k.dim]
    std::int64_t n;
    std::int64_t position; // of the first query
    int n_heads;
    int group;      // query heads a KV head
    int first_head; // KV heads first_head … first_head + n_kv_heads - 1
    int n_kv_heads; //
    Rows k, v;
    std::int64_t n_slots; // position p lies in slot p % n_slots
    std::int64_t lo, hi;
    float scale, softcap;
    std::int64_t window; // 0 for none
    float* scratch;      // scratch_floats(…)
    // Results for rows [n, n_kv_heads * group], unnormalised: sums of exp(score - peak) * v, and of exp(score
    // - peak).
    float* out; // [rows, v.dim]
    float* peak;
    float* sum;
};

// For a block as float32.
constexpr std::int64_t block_floats(int dim) {
    return std::int64_t(dim) * block_tokens;
}

// The scaled queries, a vector of partial sums each, and a block of K and of V.
constexpr std::int64_t scratch_floats(std::int64_t rows, int dim_k, int dim_v) {
    return rows * (dim_k + widest_vector) + block_floats(dim_k) + block_floats(dim_v);
}

using Kernel = void (*)(const Task&);

// The kernel for K and V of these dimensions; null where this build has none.
Kernel avx512_kernel(const Rows& k, const Rows& v);
Kernel avx2_kernel(const Rows& k, const Rows& v);
Kernel neon_kernel(const Rows& k, const Rows& v);
Kernel portable_kernel(const Rows& k, const Rows& v);

} // namespace hybrid

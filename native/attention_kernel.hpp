// The attention kernel, written once over a vector type Vec that each instruction set's file defines before
// it includes this one. Everything is local to that file: code compiled for one instruction set never leaks
// into another.
//
// For each block of keys and each KV head: scores of all its query heads (each K row is read once), an online
// softmax whose peak moves only when a score exceeds it, and the sums over V. Meanwhile the next head's rows
// are fetched into the cache: far enough ahead for memory to answer, near enough to be there still.
#pragma once

#include "attention_rows.hpp"
#include "attention_task.hpp"
#include "attention_tiles.hpp"

namespace {

using hybrid::Rows;
using hybrid::Task;
using hybrid::widest_vector;

// K or V of one head in one block, as the inner loops take it.
struct Block {
    const Functions* functions;
    const char* rows;
    int64_t stride;
    const float* scales;
    int64_t ahead; // from a row to the one to fetch meanwhile

    void skip(int n) {
        rows += n * stride;
        scales += n;
    }
};

// Some query heads of one query, and what has been summed for them.
struct Sums {
    const float* q;
    float *peak, *partial, *out;
    int n_heads;
};

// Adds n <= block_tokens keys.
void add(const Task& task, const Sums& sums, const Block& k, const Block& v, int n) {
    alignas(64) float s[max_heads * block_tokens];
    if (n < block_tokens)
        for (int i = 0; i < sums.n_heads * block_tokens; ++i)
            s[i] = minus_infinity;
    k.functions->scores[sums.n_heads - 1](k.rows, k.stride, k.scales, sums.q, task.k.dim, n, s, k.ahead);
    for (int r = 0; r < sums.n_heads; ++r)
        softmax(s + r * block_tokens, task.softcap, sums.peak[r], sums.partial + r * widest_vector,
                sums.out + r * task.v.dim, task.v.dim);
    v.functions->values[sums.n_heads - 1](v.rows, v.stride, v.scales, s, n, sums.out, task.v.dim, v.ahead);
}

// One head's block of K or V. Where many query heads or queries read it, it is converted once for all of
// them.
Block open_block(const Rows& rows, int head, int64_t slot, int n, bool often, int64_t ahead, float* scratch) {
    const Functions& functions = find_functions(rows.type);
    const char* const first = rows.data + slot * rows.slot_stride + head * rows.head_stride;
    functions.prepare(first, rows.slot_stride, n, rows.dim, scratch);
    if (!often || rows.type == RowType::f32)
        return {&functions, first, rows.slot_stride, scratch, ahead};
    float* const values = scratch + hybrid::scale_floats(rows.dim);
    functions.expand(first, rows.slot_stride, scratch, n, rows.dim, values, ahead);
    return {&find_functions(RowType::f32), reinterpret_cast<const char*>(values), 4 * int64_t(rows.dim),
            scratch, 0};
}

void run(const Task& task) {
    const int dim_k = task.k.dim, dim_v = task.v.dim, group = task.group;
    const int rows = task.n_kv_heads * group; // of one query
    float* const q = task.scratch;
    float* const partial = q + task.n * rows * dim_k;
    float* const k_scratch = partial + task.n * rows * widest_vector;
    float* const v_scratch = k_scratch + hybrid::block_floats(dim_k);
    const float scale = task.softcap != 0.0F ? task.scale / task.softcap : task.scale;
    for (int64_t i = 0; i < task.n; ++i) {
        const float* from = task.q + (i * task.n_heads + int64_t(task.first_head) * group) * dim_k;
        for (int64_t j = 0; j < int64_t(rows) * dim_k; ++j)
            q[i * rows * dim_k + j] = from[j] * scale;
    }
    for (int64_t row = 0; row < task.n * rows; ++row) {
        task.peak[row] = minus_infinity;
        for (int j = 0; j < widest_vector; ++j)
            partial[row * widest_vector + j] = 0.0F;
        for (int j = 0; j < dim_v; ++j)
            task.out[row * dim_v + j] = 0.0F;
    }

    const bool often = task.n * ((group + max_heads - 1) / max_heads) > 2;
    int n_keys = 0;
    for (int64_t p = task.lo; p < task.hi; p += n_keys) {
        const int64_t slot = p % task.n_slots;
        // As far as the ring's end.
        const int64_t left = task.hi - p < task.n_slots - slot ? task.hi - p : task.n_slots - slot;
        n_keys = int(left < block_tokens ? left : block_tokens);
        const bool more = left >= 2 * block_tokens;
        for (int h = 0; h < task.n_kv_heads; ++h) {
            const auto next = [&](const Rows& rows) {
                if (h + 1 < task.n_kv_heads)
                    return rows.head_stride;
                return more ? block_tokens * rows.slot_stride - h * rows.head_stride : 0;
            };
            const int head = task.first_head + h;
            Block k = open_block(task.k, head, slot, n_keys, often, next(task.k), k_scratch);
            Block v = open_block(task.v, head, slot, n_keys, often, next(task.v), v_scratch);
            for (int64_t i = 0; i < task.n; ++i) {
                const int64_t own =
                    task.position + i - p; // the query's own key, counted from the block's first
                const int64_t oldest = task.window ? own - task.window + 1 : 0;
                const int lo = int(oldest < 0 ? 0 : oldest < n_keys ? oldest : n_keys);
                const int hi = int(own + 1 < n_keys ? own + 1 : n_keys);
                if (lo >= hi)
                    continue;
                Block seen_k = k, seen_v = v;
                seen_k.skip(lo);
                seen_v.skip(lo);
                for (int g = 0; g < group; g += max_heads) {
                    const int64_t row = i * rows + h * group + g;
                    const Sums sums{q + row * dim_k, task.peak + row, partial + row * widest_vector,
                                    task.out + row * dim_v, group - g < max_heads ? group - g : max_heads};
                    add(task, sums, seen_k, seen_v, hi - lo);
                    k.ahead = v.ahead = seen_k.ahead = seen_v.ahead = 0; // fetched
                }
            }
        }
    }
    for (int64_t row = 0; row < task.n * rows; ++row) {
        float sum = 0.0F;
        for (int j = 0; j < widest_vector; ++j)
            sum += partial[row * widest_vector + j];
        task.sum[row] = sum;
    }
}

hybrid::Kernel find_kernel(const Rows& k, const Rows& v) {
    return k.dim % W || v.dim % W ? nullptr : run;
}

} // namespace

// The attention kernel, written once over a vector type Vec that each instruction set's file defines before
// it includes this one. Everything is local to that file: code compiled for one instruction set never leaks
// into another.
//
// For each block of keys and each KV head: scores of all its query heads (each K row is read once), an online
// softmax whose peak moves only when a score exceeds it, and the sums over V. Meanwhile the next block is
// fetched into the cache: far enough ahead for memory to answer, near enough to be there still.
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
    Strided rows;
    const char* next; // to fetch meanwhile

    Block from(int t) const { return {functions, rows.from(t), next}; }
};

// Query heads of a KV head that go together, from the g-th of them.
int n_together(int group, int g) {
    return group - g < max_heads ? group - g : max_heads;
}

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
    k.functions->scores[sums.n_heads - 1](k.rows, k.next, sums.q, task.k.dim, n, s);
    for (int r = 0; r < sums.n_heads; ++r)
        softmax(s + r * block_tokens, task.softcap, sums.peak[r], sums.partial + r * widest_vector,
                sums.out + r * task.v.dim, task.v.dim);
    v.functions->values[sums.n_heads - 1](v.rows, v.next, s, n, sums.out, task.v.dim);
}

// n keys from `slot` on of a task's h-th head, and what to fetch of the block after them, if there is one.
Block open_block(const Task& task, const Rows& rows, int h, int64_t slot, int n, bool more) {
    const char* const first = rows.data + slot * rows.slot_stride + task.first_head * rows.head_stride;
    const Strided own{first + h * rows.head_stride, rows.slot_stride};
    // Memory is quickest in its own order. Where the heads leave no gap, each fetches its share of the
    // block's bytes, whoever needs them; elsewhere that is left to the processor.
    const char* next = own.at;
    if (more && rows.slot_stride == task.n_kv_heads * rows.head_stride)
        next = first + block_tokens * rows.slot_stride + h * n * rows.head_stride;
    return {&find_functions(rows.type), own, next};
}

// The block as float32: where many query heads or queries read it, it is converted once for all of them.
Block expanded(const Block& block, const Rows& rows, int n, bool more, float* scratch) {
    if (rows.type == RowType::f32)
        return block;
    block.functions->expand(block.rows, block.rows.from(more ? block_tokens : 0), n, rows.dim, scratch);
    const auto values = reinterpret_cast<const char*>(scratch);
    return {&find_functions(RowType::f32), {values, 4 * int64_t(rows.dim)}, values};
}

// The scaled queries of the task, each as its rows are read: [dim / W, R, W] for every R <= max_heads heads.
void pack_queries(const Task& task, float scale, float* q) {
    const int dim = task.k.dim, rows = task.n_kv_heads * task.group;
    for (int64_t i = 0; i < task.n; ++i)
        for (int h = 0; h < rows; h += n_together(task.group, h % task.group)) {
            const int together = n_together(task.group, h % task.group);
            const float* const from = task.q + (i * task.n_heads + task.first_head * task.group + h) * dim;
            for (int j = 0; j < dim; j += W)
                for (int r = 0; r < together; ++r, q += W)
                    Vec::store(q, Vec::mul(Vec::load(from + r * dim + j), Vec::all(scale)));
        }
}

void run(const Task& task) {
    const int dim_k = task.k.dim, dim_v = task.v.dim, group = task.group;
    const int rows = task.n_kv_heads * group; // of one query
    float* const q = task.scratch;
    float* const partial = q + task.n * rows * dim_k;
    float* const k_scratch = partial + task.n * rows * widest_vector;
    float* const v_scratch = k_scratch + hybrid::block_floats(dim_k);
    pack_queries(task, task.softcap != 0.0F ? task.scale / task.softcap : task.scale, q);
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
            Block k = open_block(task, task.k, h, slot, n_keys, more);
            Block v = open_block(task, task.v, h, slot, n_keys, more);
            if (often) {
                k = expanded(k, task.k, n_keys, more, k_scratch);
                v = expanded(v, task.v, n_keys, more, v_scratch);
            }
            for (int64_t i = 0; i < task.n; ++i) {
                const int64_t own =
                    task.position + i - p; // the query's own key, counted from the block's first
                const int64_t oldest = task.window ? own - task.window + 1 : 0;
                const int lo = int(oldest < 0 ? 0 : oldest < n_keys ? oldest : n_keys);
                const int hi = int(own + 1 < n_keys ? own + 1 : n_keys);
                if (lo >= hi)
                    continue;
                for (int g = 0; g < group; g += max_heads) {
                    const int64_t row = i * rows + h * group + g;
                    const Sums sums{q + row * dim_k, task.peak + row, partial + row * widest_vector,
                                    task.out + row * dim_v, n_together(group, g)};
                    add(task, sums, k.from(lo), v.from(lo), hi - lo);
                    k.next = k.rows.at, v.next = v.rows.at; // fetched
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

// The attention kernel, written once over a vector type Vec that each instruction set's file defines before
// it includes this one. Everything is local to that file: code compiled for one instruction set never leaks
// into another.
//
// For each block of 16 keys and each KV head: scores of all its query heads (each K row is read once), an
// online softmax whose peak moves only when a score exceeds it, and the sums over V. While a block is
// computed, the same head's rows of the next one are fetched into the cache.
#pragma once

#include "attention_task.hpp"

namespace {

using hybrid::block_tokens;
using hybrid::Rows;
using hybrid::RowType;
using hybrid::Task;
using std::int64_t;
using std::uint16_t;
using Reg = Vec::Reg;

constexpr int W = Vec::width;
constexpr float minus_infinity = -__builtin_inff();

// -- rows of each type
// ---------------------------------------------------------------------------------------

// read<N>: vectors i … i + N - 1 of a row as float32.
template <RowType> struct Reader;

template <> struct Reader<RowType::f32> {
    static constexpr int step = 1;
    static constexpr int64_t offset(int64_t i) { return 4 * i; }
    template <int N> static void read(const char* row, int i, Reg (&x)[N]) {
        for (int j = 0; j < N; ++j)
            x[j] = Vec::load(reinterpret_cast<const float*>(row) + (i + j) * W);
    }
};

template <> struct Reader<RowType::f16> {
    static constexpr int step = 1;
    static constexpr int64_t offset(int64_t i) { return 2 * i; }
    template <int N> static void read(const char* row, int i, Reg (&x)[N]) {
        for (int j = 0; j < N; ++j)
            x[j] = Vec::load_f16(row + 2 * (i + j) * W);
    }
};

template <> struct Reader<RowType::bf16> {
    static constexpr int step = 1;
    static constexpr int64_t offset(int64_t i) { return 2 * i; }
    template <int N> static void read(const char* row, int i, Reg (&x)[N]) {
        for (int j = 0; j < N; ++j)
            x[j] = Vec::load_bf16(row + 2 * (i + j) * W);
    }
};

// Blocks of a float16 scale and 32 signed bytes. N vectors are part of a block or whole blocks.
template <> struct Reader<RowType::q8_0> {
    static constexpr int step = W < 32 ? 32 / W : 1;
    static constexpr int64_t offset(int64_t i) { return i / 32 * 34; }
    template <int N> static void read(const char* row, int i, Reg (&x)[N]) {
        Reg d;
        for (int j = 0; j < N; ++j) {
            const int at = (i + j) * W;
            const char* block = row + at / 32 * 34;
            if (j == 0 || j * W % 32 == 0)
                d = Vec::all_f16(block);
            x[j] = Vec::mul(Vec::load_i8(block + 2 + at % 32), d);
        }
    }
};

inline void prefetch(const char* at) {
    __builtin_prefetch(at, 0, 3);
}

// Where the next block's row lies, seen from this one's; 0 if there is none.
struct Ahead {
    int64_t bytes;
    // Fetches the lines that begin in bytes lo … hi - 1 of the row.
    void fetch(const char* row, int64_t lo, int64_t hi) const {
        if (bytes)
            for (int64_t at = (lo + 63) / 64 * 64; at < hi; at += 64)
                prefetch(row + bytes + at);
    }
};

// -- scores
// --------------------------------------------------------------------------------------------------

// s[r][t] = q[r] · k[t] for R query heads and N keys.
template <RowType K, int R, int N>
inline void score_tile(const char* k, int64_t stride, const float* q, int dim, float* s) {
    constexpr int step = Reader<K>::step;
    Reg acc[R][N];
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < N; ++t)
            acc[r][t] = Vec::zero();
    const int vectors = dim / W;
    for (int i = 0; i < vectors; i += step) {
        for (int t = 0; t < N; ++t) {
            Reg x[step];
            Reader<K>::read(k + t * stride, i, x);
            for (int j = 0; j < step; ++j)
                for (int r = 0; r < R; ++r)
                    acc[r][t] = Vec::fma(Vec::load(q + r * dim + (i + j) * W), x[j], acc[r][t]);
        }
    }
    Vec::template sums<R, N>(acc, s);
}

template <RowType K, int R>
inline void scores(const char* k, int64_t stride, const float* q, int dim, int n, float* s, Ahead ahead) {
    constexpr int N = Vec::keys(R);
    const int64_t row_bytes = Reader<K>::offset(dim);
    int t = 0;
    for (; t + N <= n; t += N) {
        for (int u = 0; u < N; ++u)
            ahead.fetch(k + (t + u) * stride, 0, row_bytes);
        score_tile<K, R, N>(k + t * stride, stride, q, dim, s + t);
    }
    for (; t < n; ++t)
        score_tile<K, R, 1>(k + t * stride, stride, q, dim, s + t);
}

// -- softmax
// -------------------------------------------------------------------------------------------------

// exp(x) to a few ulp for x <= 88; exactly 0 below -87, so that no product is denormal. NaN stays NaN.
inline Reg exp(Reg x) {
    constexpr float lowest = -87.0F;
    constexpr float to_integer = 12582912.0F; // 1.5 * 2^23: adding it rounds to an integer
    const Reg at = Vec::max(Vec::all(lowest), x);
    const Reg n = Vec::sub(Vec::fma(at, Vec::all(1.44269504F), Vec::all(to_integer)), Vec::all(to_integer));
    Reg r = Vec::fma(n, Vec::all(-0.693359375F), at);
    r = Vec::fma(n, Vec::all(2.12194440e-4F), r);
    Reg y = Vec::all(1.9875691500e-4F); // Cephes' expf
    y = Vec::fma(y, r, Vec::all(1.3981999507e-3F));
    y = Vec::fma(y, r, Vec::all(8.3334519073e-3F));
    y = Vec::fma(y, r, Vec::all(4.1665795894e-2F));
    y = Vec::fma(y, r, Vec::all(1.6666665459e-1F));
    y = Vec::fma(y, r, Vec::all(5.0000001201e-1F));
    y = Vec::fma(Vec::mul(r, r), y, Vec::add(r, Vec::all(1.0F)));
    return Vec::zero_where_less(x, Vec::all(lowest), Vec::mul(y, Vec::pow2(n)));
}

inline Reg tanh(Reg x) {
    const Reg e = exp(Vec::min(Vec::all(40.0F), Vec::add(x, x)));
    return Vec::sub(Vec::all(1.0F), Vec::div(Vec::all(2.0F), Vec::add(e, Vec::all(1.0F))));
}

// One row's scores become exp(score - peak); where the peak rises, what was summed before shrinks.
inline void softmax(float* s, float softcap, float& peak, float* sums, float* out, int dim) {
    constexpr int n = block_tokens / W;
    Reg x[n];
    for (int i = 0; i < n; ++i)
        x[i] = Vec::load(s + i * W);
    if (softcap != 0.0F) {
        for (int i = 0; i < n; ++i) // minus infinity, where no key is, stays
            x[i] = Vec::copy_where_less(x[i], Vec::all(-3.0e38F), Vec::mul(Vec::all(softcap), tanh(x[i])));
    }
    Reg top = x[0];
    for (int i = 1; i < n; ++i)
        top = Vec::max(top, x[i]);
    Reg sum = Vec::load(sums);
    if (Vec::any_greater(top, Vec::all(peak))) {
        const float risen = Vec::highest(top);
        const Reg shrink = exp(Vec::all(peak - risen));
        peak = risen;
        sum = Vec::mul(sum, shrink);
        for (int i = 0; i < dim; i += W)
            Vec::store(out + i, Vec::mul(Vec::load(out + i), shrink));
    }
    const Reg base = Vec::max(Vec::all(-3.0e38F), Vec::all(peak)); // a row may have seen scores of -inf only
    for (int i = 0; i < n; ++i) {
        x[i] = exp(Vec::sub(x[i], base));
        sum = Vec::add(sum, x[i]);
        Vec::store(s + i * W, x[i]);
    }
    Vec::store(sums, sum);
}

// -- values
// --------------------------------------------------------------------------------------------------

// out[r] += s[r][t] * v[t], vectors i … i + N - 1 of them.
template <RowType V, int R, int N>
inline void value_tile(const char* v, int64_t stride, const float* s, int n, float* out, int dim, int i,
                       Ahead ahead) {
    Reg acc[R][N];
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < N; ++j)
            acc[r][j] = Vec::load(out + r * dim + (i + j) * W);
    const int64_t from = Reader<V>::offset(int64_t(i) * W), to = Reader<V>::offset(int64_t(i + N) * W);
    for (int t = 0; t < n; ++t, v += stride) {
        ahead.fetch(v, from, to);
        Reg x[N];
        Reader<V>::read(v, i, x);
        for (int r = 0; r < R; ++r) {
            const Reg p = Vec::all(s[r * block_tokens + t]);
            for (int j = 0; j < N; ++j)
                acc[r][j] = Vec::fma(p, x[j], acc[r][j]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < N; ++j)
            Vec::store(out + r * dim + (i + j) * W, acc[r][j]);
}

template <RowType V, int R>
inline void values(const char* v, int64_t stride, const float* s, int n, float* out, int dim, Ahead ahead) {
    constexpr int N = Vec::columns(R);
    const int vectors = dim / W;
    int i = 0;
    for (; i + N <= vectors; i += N)
        value_tile<V, R, N>(v, stride, s, n, out, dim, i, ahead);
    for (; i < vectors; ++i)
        value_tile<V, R, 1>(v, stride, s, n, out, dim, i, ahead);
}

// -- a task
// --------------------------------------------------------------------------------------------------

// One block of keys for some query heads of one query: keys lo … hi - 1 of the block are visible.
struct Step {
    const char *k, *v; // the block's first rows
    const float* q;
    float *peak, *sums, *out;
    int lo, hi;
    Ahead k_ahead, v_ahead;
};

constexpr int max_heads = 4;

using Scores = void (*)(const char* k, int64_t stride, const float* q, int dim, int n, float* s, Ahead ahead);
using Values = void (*)(const char* v, int64_t stride, const float* s, int n, float* out, int dim,
                        Ahead ahead);

template <RowType T>
constexpr Scores scores_of[max_heads] = {scores<T, 1>, scores<T, 2>, scores<T, 3>, scores<T, 4>};
template <RowType T>
constexpr Values values_of[max_heads] = {values<T, 1>, values<T, 2>, values<T, 3>, values<T, 4>};

const Scores* find_scores(RowType type) {
    switch (type) {
    case RowType::f16:
        return scores_of<RowType::f16>;
    case RowType::bf16:
        return scores_of<RowType::bf16>;
    case RowType::q8_0:
        return scores_of<RowType::q8_0>;
    default:
        return scores_of<RowType::f32>;
    }
}

const Values* find_values(RowType type) {
    switch (type) {
    case RowType::f16:
        return values_of<RowType::f16>;
    case RowType::bf16:
        return values_of<RowType::bf16>;
    case RowType::q8_0:
        return values_of<RowType::q8_0>;
    default:
        return values_of<RowType::f32>;
    }
}

void step(const Task& task, const Step& a, int heads, Scores scores, Values values) {
    alignas(64) float s[max_heads * block_tokens];
    const int n = a.hi - a.lo;
    if (n < block_tokens)
        for (int i = 0; i < heads * block_tokens; ++i)
            s[i] = minus_infinity;
    const int64_t k_stride = task.k.slot_stride, v_stride = task.v.slot_stride;
    scores(a.k + a.lo * k_stride, k_stride, a.q, task.k.dim, n, s + a.lo, a.k_ahead);
    for (int r = 0; r < heads; ++r)
        softmax(s + r * block_tokens, task.softcap, a.peak[r], a.sums + r * 16, a.out + r * task.v.dim,
                task.v.dim);
    values(a.v + a.lo * v_stride, v_stride, s + a.lo, n, a.out, task.v.dim, a.v_ahead);
}

void run(const Task& task) {
    const Scores* const scores = find_scores(task.k.type);
    const Values* const values = find_values(task.v.type);
    const int dim_k = task.k.dim, dim_v = task.v.dim, group = task.group;
    const int rows = task.n_kv_heads * group; // of one query
    float* const q = task.scratch;
    float* const sums = q + task.n * rows * dim_k;
    const float scale = task.softcap != 0.0F ? task.scale / task.softcap : task.scale;
    for (int64_t i = 0; i < task.n; ++i) {
        const float* from = task.q + (i * task.n_heads + int64_t(task.first_head) * group) * dim_k;
        for (int64_t j = 0; j < int64_t(rows) * dim_k; ++j)
            q[i * rows * dim_k + j] = from[j] * scale;
    }
    for (int64_t row = 0; row < task.n * rows; ++row) {
        task.peak[row] = minus_infinity;
        for (int j = 0; j < 16; ++j)
            sums[row * 16 + j] = 0.0F;
        for (int j = 0; j < dim_v; ++j)
            task.out[row * dim_v + j] = 0.0F;
    }

    int n_keys = 0;
    for (int64_t p = task.lo; p < task.hi; p += n_keys) {
        const int64_t slot = p % task.n_slots;
        int64_t left =
            task.hi - p < task.n_slots - slot ? task.hi - p : task.n_slots - slot; // to the ring's end
        n_keys = int(left < block_tokens ? left : block_tokens);
        const bool more = left >= 2 * block_tokens;
        for (int h = 0; h < task.n_kv_heads; ++h) {
            Step a;
            a.k = task.k.data + slot * task.k.slot_stride + (task.first_head + h) * task.k.head_stride;
            a.v = task.v.data + slot * task.v.slot_stride + (task.first_head + h) * task.v.head_stride;
            a.k_ahead.bytes = more ? block_tokens * task.k.slot_stride : 0;
            a.v_ahead.bytes = more ? block_tokens * task.v.slot_stride : 0;
            for (int64_t i = 0; i < task.n; ++i) {
                const int64_t at =
                    task.position + i - p; // the query's own key, counted from the block's first
                const int64_t oldest = task.window ? at - task.window + 1 : 0;
                a.lo = int(oldest < 0 ? 0 : oldest < n_keys ? oldest : n_keys);
                a.hi = int(at + 1 < n_keys ? at + 1 : n_keys);
                if (a.lo >= a.hi)
                    continue;
                for (int g = 0; g < group; g += max_heads) {
                    const int heads = group - g < max_heads ? group - g : max_heads;
                    const int64_t row = i * rows + h * group + g;
                    a.q = q + row * dim_k;
                    a.peak = task.peak + row;
                    a.sums = sums + row * 16;
                    a.out = task.out + row * dim_v;
                    step(task, a, heads, scores[heads - 1], values[heads - 1]);
                    a.k_ahead.bytes = a.v_ahead.bytes = 0; // fetched
                }
            }
        }
    }
    for (int64_t row = 0; row < task.n * rows; ++row) {
        float sum = 0.0F;
        for (int j = 0; j < 16; ++j)
            sum += sums[row * 16 + j];
        task.sum[row] = sum;
    }
}

hybrid::Kernel find_kernel(const Rows& k, const Rows& v) {
    return k.dim % W || v.dim % W ? nullptr : run;
}

} // namespace

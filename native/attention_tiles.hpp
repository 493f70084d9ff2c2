// The inner loops of attention over a block of keys, for up to four query heads that share it; included by
// attention_kernel.hpp, which see.
#pragma once

#include "attention_rows.hpp"

namespace {

constexpr float minus_infinity = -__builtin_inff();

// Rows of a cache, a fixed number of bytes apart.
struct Strided {
    const char* at;
    int64_t stride;

    const char* row(int64_t t) const { return at + t * stride; }
    Strided from(int64_t t) const { return {row(t), stride}; }
};

inline void prefetch(const char* at) {
    __builtin_prefetch(at, 0, 3);
}

// Scores ------------------------------------------------------------------

// Adds the products of vectors i … i + M - 1 of R queries and N keys.
template <RowType K, int R, int N, int M>
INLINE void add_products(Strided k, const float* q, int i, Reg (&acc)[R][N]) {
    Reg x[N][M];
    UNROLL
    for (int t = 0; t < N; ++t)
        Reader<K>::read(k.row(t), i, x[t]);
    UNROLL
    for (int j = 0; j < M; ++j) {
        UNROLL
        for (int r = 0; r < R; ++r) {
            const Reg y = Vec::load(q + ((i + j) * R + r) * W);
            UNROLL
            for (int t = 0; t < N; ++t)
                acc[r][t] = Vec::fma(y, x[t][j], acc[r][t]);
        }
    }
}

// s[r][t] = q[r] · k[t] for R query heads and N keys. Fetches as many bytes as it reads, from next on.
template <RowType K, int R, int N>
INLINE void score_tile(Strided k, const char* next, const float* q, int dim, float* s) {
    constexpr int line = Reader<K>::line;
    Reg acc[R][N];
    UNROLL
    for (int r = 0; r < R; ++r) {
        UNROLL
        for (int t = 0; t < N; ++t)
            acc[r][t] = Vec::zero();
    }
    const int vectors = dim / W;
    int i = 0;
    for (; i + line <= vectors; i += line) {
        UNROLL
        for (int t = 0; t < N; ++t)
            prefetch(next + (i / line * N + t) * Reader<K>::offset(line * W));
        add_products<K, R, N, line>(k, q, i, acc);
    }
    if constexpr (line > 1)
        for (; i < vectors; ++i)
            add_products<K, R, N, 1>(k, q, i, acc);
    Vec::template sums<R, N>(acc, s);
}

// q is [dim / W, R, W]: in the order in which it is read.
template <RowType K, int R>
void scores(Strided k, const char* next, const float* q, int dim, int n, float* s) {
    constexpr int N = Vec::keys(R);
    int t = 0;
    for (; t + N <= n; t += N)
        score_tile<K, R, N>(k.from(t), next + t * Reader<K>::offset(dim), q, dim, s + t);
    for (; t < n; ++t)
        score_tile<K, R, 1>(k.from(t), next + t * Reader<K>::offset(dim), q, dim, s + t);
}

// Softmax ---------------------------------------------------------------

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

// Values ------------------------------------------------------------------

// out[r] += s[r][t] * v[t], vectors i … i + N - 1 of them; n > 0. Fetches as many bytes as it reads: each
// call its share of what lies from next on.
template <RowType V, int R, int N>
INLINE void value_tile(Strided v, const char* next, const float* s, int n, float* out, int dim, int i) {
    Reg acc[R][N];
    UNROLL
    for (int r = 0; r < R; ++r) {
        UNROLL
        for (int j = 0; j < N; ++j)
            acc[r][j] = Vec::load(out + r * dim + (i + j) * W);
    }
    next += Reader<V>::offset(int64_t(i) * W) * n;
    int t = 0;
    do {
        UNROLL
        for (int j = 0; j < N; j += Reader<V>::line)
            prefetch(next + j / Reader<V>::line * 64);
        Reg x[N];
        Reader<V>::read(v.at, i, x);
        UNROLL
        for (int r = 0; r < R; ++r) {
            const Reg p = Vec::all(s[r * block_tokens + t]);
            UNROLL
            for (int j = 0; j < N; ++j)
                acc[r][j] = Vec::fma(p, x[j], acc[r][j]);
        }
        v.at += v.stride;
        next += Reader<V>::offset(N * W);
    } while (++t < n);
    UNROLL
    for (int r = 0; r < R; ++r) {
        UNROLL
        for (int j = 0; j < N; ++j)
            Vec::store(out + r * dim + (i + j) * W, acc[r][j]);
    }
}

template <RowType V, int R>
void values(Strided v, const char* next, const float* s, int n, float* out, int dim) {
    constexpr int N = Vec::columns(R);
    const int vectors = dim / W;
    int i = 0;
    for (; i + N <= vectors; i += N)
        value_tile<V, R, N>(v, next, s, n, out, dim, i);
    for (; i < vectors; ++i)
        value_tile<V, R, 1>(v, next, s, n, out, dim, i);
}

// Each type -------------------------------------------------------------

// Rows as float32 [n, dim].
template <RowType T> void expand(Strided rows, Strided next, int n, int dim, float* out) {
    constexpr int line = Reader<T>::line;
    for (int t = 0; t < n; ++t) {
        int i = 0;
        for (; i + line <= dim / W; i += line) {
            prefetch(next.row(t) + Reader<T>::offset(i * W));
            Reg x[line];
            Reader<T>::read(rows.row(t), i, x);
            UNROLL
            for (int j = 0; j < line; ++j, out += W)
                Vec::store(out, x[j]);
        }
        if constexpr (line > 1)
            for (; i < dim / W; ++i, out += W) {
                Reg x[1];
                Reader<T>::read(rows.row(t), i, x);
                Vec::store(out, x[0]);
            }
    }
}

constexpr int max_heads = 4;

// The functions above for one type, by the number of heads less one where that matters.
struct Functions {
    void (*expand)(Strided rows, Strided next, int n, int dim, float* out);
    void (*scores[max_heads])(Strided k, const char* next, const float* q, int dim, int n, float* s);
    void (*values[max_heads])(Strided v, const char* next, const float* s, int n, float* out, int dim);
};

template <RowType T>
constexpr Functions functions_of = {expand<T>,
                                    {scores<T, 1>, scores<T, 2>, scores<T, 3>, scores<T, 4>},
                                    {values<T, 1>, values<T, 2>, values<T, 3>, values<T, 4>}};

const Functions& find_functions(RowType type) {
    switch (type) {
    case RowType::f16:
        return functions_of<RowType::f16>;
    case RowType::bf16:
        return functions_of<RowType::bf16>;
    case RowType::q8_0:
        return functions_of<RowType::q8_0>;
    default:
        return functions_of<RowType::f32>;
    }
}

} // namespace

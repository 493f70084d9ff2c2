// attention_check [N]: N attentions of random shapes (300 by default), each on every instruction set, against
// a plain loop in double. Built with sanitizers (make sanitize); all memory is allocated to the byte, so that
// they see every access beyond it. Exits with 1 at the first difference.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "attention.hpp"
#include "bandwidth.hpp"

using namespace hybrid;

namespace {

std::mt19937 generator(1);

std::int64_t pick(std::int64_t lo, std::int64_t hi) {
    return std::uniform_int_distribution<std::int64_t>(lo, hi)(generator);
}

template <typename T> T one_of(std::initializer_list<T> choices) {
    return *(choices.begin() + pick(0, static_cast<std::int64_t>(choices.size()) - 1));
}

float normal() {
    return std::normal_distribution<float>()(generator);
}

// Halves of few bits, which are exact in every type: 1.m * 2^e with |e| <= 2.
std::uint16_t random_half() {
    return static_cast<std::uint16_t>(pick(0, 1) << 15 | pick(13, 17) << 10 | pick(0, 7) << 7);
}

double from_half(std::uint16_t half) {
    const double size = std::ldexp(1024 + (half & 0x3ff), (half >> 10 & 31) - 25);
    return half & 0x8000 ? -size : size;
}

// Rows [n_slots, n_heads, dim] in memory of exactly their size, and what they mean.
struct Cache {
    RowType type;
    int n_heads, dim;
    std::vector<char> bytes;
    std::vector<double> values;

    std::int64_t head_bytes() const {
        return type == RowType::q8_0 ? dim / 32 * 34
                                     : static_cast<std::int64_t>(dim) * (type == RowType::f32 ? 4 : 2);
    }

    Cache(RowType type, std::int64_t n_slots, int n_heads, int dim) : type(type), n_heads(n_heads), dim(dim) {
        bytes.assign(static_cast<std::size_t>(n_slots * n_heads * head_bytes()), '\xff'); // NaN in every type
        values.assign(static_cast<std::size_t>(n_slots * n_heads * dim), std::nan(""));
    }

    void fill(std::int64_t slot) {
        for (std::int64_t row = slot * n_heads; row < (slot + 1) * n_heads; ++row) {
            char* const at = bytes.data() + row * head_bytes();
            double* const value = values.data() + row * dim;
            double d = 0;
            for (int i = 0; i < dim; ++i) {
                if (type == RowType::q8_0) {
                    char* const block = at + i / 32 * 34;
                    if (i % 32 == 0) {
                        const std::uint16_t half = random_half() & 0x7fff;
                        std::memcpy(block, &half, 2);
                        d = from_half(half) / 64;
                        const std::uint16_t scaled = static_cast<std::uint16_t>(half - (6 << 10));
                        std::memcpy(block, &scaled, 2);
                    }
                    const auto byte = static_cast<signed char>(pick(-127, 127));
                    std::memcpy(block + 2 + i % 32, &byte, 1);
                    value[i] = d * byte;
                    continue;
                }
                const std::uint16_t half = random_half();
                value[i] = from_half(half);
                const auto single = static_cast<float>(value[i]);
                std::uint32_t bits;
                std::memcpy(&bits, &single, 4);
                const auto brain = static_cast<std::uint16_t>(bits >> 16);
                if (type == RowType::f32)
                    std::memcpy(at + 4 * i, &single, 4);
                else
                    std::memcpy(at + 2 * i, type == RowType::f16 ? &half : &brain, 2);
            }
        }
    }

    Rows rows() const { return {bytes.data(), n_heads * head_bytes(), head_bytes(), type, dim}; }

    const double* at(std::int64_t slot, int head) const {
        return values.data() + (slot * n_heads + head) * dim;
    }
};

struct Case {
    Attention work{};
    std::vector<Cache> caches; // K and V of each run
    std::vector<float> q, sinks;

    Case() {
        const int n_kv_heads = static_cast<int>(pick(1, 4));
        work.n_kv_heads = n_kv_heads;
        work.n_heads = n_kv_heads * static_cast<int>(pick(1, 9));
        const auto type = [] { return one_of({RowType::f32, RowType::f16, RowType::bf16, RowType::q8_0}); };
        const RowType type_k = type(), type_v = type();
        const auto dim = [](RowType t) {
            return t == RowType::q8_0 ? one_of({32, 64, 96, 128, 256})
                                      : one_of({1, 3, 8, 16, 20, 40, 64, 72, 80, 128, 256});
        };
        work.dim_k = dim(type_k);
        work.dim_v = dim(type_v);
        work.scale = 1 / std::sqrt(static_cast<float>(work.dim_k)) / 4;
        work.window = one_of({0, 0, 0, 1, 5, 16, 40});
        work.softcap = one_of({0.0F, 0.0F, 2.0F, 30.0F});
        for (std::int64_t i = pick(1, 3); i > 0; --i) {
            AttentionRun run{};
            run.start = work.n;
            run.n = one_of<std::int64_t>({1, 1, 1, 2, 3, 7, 15, 16, 17, 33});
            run.n_slots = one_of<std::int64_t>({0, 1, 2, 15, 16, 17, 40, 63, 64, 300, 700});
            run.first = pick(0, 3 * run.n_slots);
            run.end = run.first + pick(0, run.n_slots);
            run.position =
                std::max<std::int64_t>(0, one_of({run.end - 1, run.end - run.n, run.first - 2, run.end + 9}));
            caches.emplace_back(type_k, run.n_slots, n_kv_heads, work.dim_k);
            caches.emplace_back(type_v, run.n_slots, n_kv_heads, work.dim_v);
            for (std::int64_t p = run.first; p < run.end; ++p)
                for (std::size_t c = caches.size() - 2; c < caches.size(); ++c)
                    caches[c].fill(p % run.n_slots);
            work.n += run.n;
            work.runs.push_back(run);
        }
        for (std::size_t i = 0; i < work.runs.size(); ++i) {
            work.runs[i].k = caches[2 * i].rows();
            work.runs[i].v = caches[2 * i + 1].rows();
        }
        q.resize(static_cast<std::size_t>(work.n * work.n_heads * work.dim_k));
        for (float& x : q)
            x = normal();
        work.q = q.data();
        if (pick(0, 2) == 0) {
            sinks.resize(static_cast<std::size_t>(work.n_heads));
            for (float& x : sinks)
                x = 3 * normal();
            work.sinks = sinks.data();
        }
    }
};

struct Result {
    std::vector<double> out, lse;
};

Result reference(const Case& c) {
    const Attention& a = c.work;
    Result result;
    for (std::size_t i = 0; i < a.runs.size(); ++i) {
        const AttentionRun& run = a.runs[i];
        for (std::int64_t j = 0; j < run.n; ++j)
            for (int head = 0; head < a.n_heads; ++head) {
                const std::int64_t p = run.position + j;
                const float* const q = a.q + ((run.start + j) * a.n_heads + head) * a.dim_k;
                double sum = a.sinks ? std::exp(static_cast<double>(a.sinks[head])) : 0;
                std::vector<double> out(static_cast<std::size_t>(a.dim_v));
                for (std::int64_t key = run.first; key < run.end && key <= p; ++key) {
                    if (a.window && key <= p - a.window)
                        continue;
                    const int kv_head = head / (a.n_heads / a.n_kv_heads);
                    const double* const k = c.caches[2 * i].at(key % run.n_slots, kv_head);
                    const double* const v = c.caches[2 * i + 1].at(key % run.n_slots, kv_head);
                    double score = 0;
                    for (int d = 0; d < a.dim_k; ++d)
                        score += q[d] * k[d];
                    score *= a.scale;
                    if (a.softcap != 0)
                        score = a.softcap * std::tanh(score / a.softcap);
                    sum += std::exp(score);
                    for (int d = 0; d < a.dim_v; ++d)
                        out[static_cast<std::size_t>(d)] += std::exp(score) * v[d];
                }
                for (double x : out)
                    result.out.push_back(sum > 0 ? x / sum : 0);
                result.lse.push_back(std::log(sum));
            }
    }
    return result;
}

bool close(const std::vector<float>& ours, const std::vector<double>& true_values) {
    for (std::size_t i = 0; i < ours.size(); ++i)
        if (!(ours[i] == true_values[i] ||
              std::abs(ours[i] - true_values[i]) < 1e-4 * (1 + std::abs(true_values[i]))))
            return false;
    return true;
}

bool agrees(const Case& c, const Result& expected, int n_threads, const std::string& set) {
    std::vector<float> out(expected.out.size()), lse(expected.lse.size());
    Attention work = c.work;
    work.out = out.data();
    work.lse = lse.data();
    attend(work, n_threads, set);
    return close(out, expected.out) && close(lse, expected.lse);
}

// Numbers that cannot be right are refused before any memory is touched.
bool refuses_nonsense() {
    Case c;
    const auto refused = [&](auto change) {
        Attention work = c.work;
        float nowhere = 0;
        work.out = work.lse = &nowhere;
        change(work);
        try {
            attend(work, 2, "");
        } catch (const std::invalid_argument&) {
            return true;
        }
        return false;
    };
    constexpr std::int64_t huge = std::numeric_limits<std::int64_t>::max();
    return refused([](Attention& a) { a.n = -1; }) && refused([](Attention& a) { a.n = huge; }) &&
           refused([](Attention& a) { a.n_kv_heads = 0; }) && refused([](Attention& a) { a.dim_k = -4; }) &&
           refused([](Attention& a) { a.runs[0].position = huge; }) &&
           refused([](Attention& a) { a.runs[0].end = huge; }) &&
           refused([](Attention& a) { a.runs[0].first = -huge; }) &&
           refused([](Attention& a) { a.runs[0].n_slots = huge; }) &&
           refused([](Attention& a) { a.runs[0].k.slot_stride = -huge, a.runs[0].n_slots = 9; }) &&
           refused([](Attention& a) { a.runs[0].k.head_stride = huge - 3, a.n_heads = a.n_kv_heads = 8; });
}

} // namespace

int main(int argc, char** argv) {
    const int n = argc > 1 ? std::atoi(argv[1]) : 300;
    const std::vector<std::string> sets = instruction_sets();
    for (int i = 0; i < n; ++i) {
        const Case c;
        const Result expected = reference(c);
        for (const std::string& set : sets)
            if (!agrees(c, expected, static_cast<int>(pick(1, 4)), set)) {
                std::printf("case %d differs on %s\n", i, set.c_str());
                return 1;
            }
        if (i % 10 == 0) { // two callers at once
            bool other = false;
            std::thread caller([&] { other = agrees(c, expected, 3, ""); });
            const bool one = agrees(c, expected, 2, "");
            caller.join();
            if (!one || !other) {
                std::printf("case %d differs between two callers\n", i);
                return 1;
            }
        }
    }
    if (!refuses_nonsense()) {
        std::printf("nonsense was not refused\n");
        return 1;
    }
    if (!(read_bandwidth(1 << 20, 3, 0) > 0))
        return 1;
    std::printf("%d cases agree on", n);
    for (const std::string& set : sets)
        std::printf(" %s", set.c_str());
    std::printf("\n");
    return 0;
}

// Attention on the CPU over a KV cache in host memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attention_task.hpp"

namespace hybrid {

// Consecutive tokens of one sequence, and that sequence's cache of one layer. Positions first … end - 1 are
// held, p in slot p % n_slots.
struct AttentionRun {
    std::int64_t start; // first row of q
    std::int64_t n;
    std::int64_t position; // of the first token
    Rows k, v;
    std::int64_t n_slots;
    std::int64_t first, end;
};

struct Attention {
    const float* q; // [n, n_heads, dim_k]
    float* out;     // [n, n_heads, dim_v]
    float* lse;     // [n, n_heads]: log of the sum of exp(score), minus infinity where no key is seen
    std::int64_t n;
    int n_heads, n_kv_heads, dim_k, dim_v;
    float scale;
    std::int64_t window;            // 0 for none
    float softcap;                  // 0 for none
    const float* sinks;             // [n_heads], may be null
    std::vector<AttentionRun> runs; // cover the rows of q, in order
};

// The instruction sets this build has and this processor can run, best first; the last is "portable".
std::vector<std::string> instruction_sets();

// Computes out and lse. The name is one of instruction_sets(), or empty for the best. Head dimensions that do
// not fill its vectors are left to a narrower one. The result depends on n_threads by rounding only, and on
// nothing else. Throws std::invalid_argument for sizes, strides or pointers that cannot be right.
void attend(const Attention& work, int n_threads, const std::string& instruction_set);

} // namespace hybrid

#include "attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>

#include "attention_plan.hpp"
#include "pool.hpp"

namespace hybrid {

namespace {

constexpr std::int64_t max_position = std::int64_t(1) << 40;
constexpr int max_dim = 1 << 16;
constexpr int max_threads = 1024;

struct InstructionSet {
    const char* name;
    bool (*runs_here)();
    Kernel (*kernel)(const Rows& k, const Rows& v);
};

bool always() {
    return true;
}

#if defined(__x86_64__) || defined(__i386__)
bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
#else
bool has_avx512() {
    return false;
}

bool has_avx2() {
    return false;
}
#endif

constexpr InstructionSet known_sets[] = {
    {"avx512", has_avx512, avx512_kernel},
    {"avx2", has_avx2, avx2_kernel},
    {"neon", always, neon_kernel},
    {"portable", always, portable_kernel},
};

// A build without an instruction set has no kernel for anything.
bool usable(const InstructionSet& set) {
    const Rows easy{nullptr, 0, 0, RowType::f32, 64};
    return set.runs_here() && set.kernel(easy, easy);
}

Kernel find_kernel(const std::string& name, const Rows& k, const Rows& v) {
    bool found = name.empty();
    for (const InstructionSet& set : known_sets) {
        found = found || name == set.name;
        if (!found)
            continue;
        if (!usable(set)) {
            if (name == set.name)
                break;
            continue;
        }
        if (const Kernel kernel = set.kernel(k, v))
            return kernel;
    }
    throw std::invalid_argument("this build or this processor has no instruction set \"" + name + "\"");
}

// Checks ----------------------------------------------------------------

void require(bool condition, const char* otherwise) {
    if (!condition)
        throw std::invalid_argument(otherwise);
}

void check(const Rows& rows, int dim, int n_kv_heads, std::int64_t n_slots) {
    require(rows.dim == dim, "K or V has another head dimension than q or the output");
    require(rows.type != RowType::q8_0 || dim % 32 == 0, "q8_0 needs a head dimension divisible by 32");
    const std::int64_t least = row_bytes(rows.type, dim);
    const std::int64_t alignment = rows.type == RowType::f32 ? 4 : 2;
    require(n_kv_heads == 1 || rows.head_stride >= least, "the heads of K or V overlap");
    require(n_slots <= 1 || rows.slot_stride >= least, "the slots of K or V overlap");
    require(rows.slot_stride % alignment == 0 && rows.head_stride % alignment == 0 &&
                reinterpret_cast<std::uintptr_t>(rows.data) % alignment == 0,
            "K or V is not aligned to its values");
    const std::int64_t most = std::numeric_limits<std::int64_t>::max() / 4;
    require(rows.slot_stride <= most / std::max<std::int64_t>(1, n_slots) &&
                rows.head_stride <= most / n_kv_heads,
            "K or V is larger than memory can be");
    require(rows.data || n_slots == 0, "K or V is missing");
}

void check(const Attention& a) {
    require(a.n >= 0 && a.n <= max_position, "the number of queries is out of range");
    require(a.n_kv_heads > 0 && a.n_heads > 0 && a.n_heads <= max_dim && a.n_heads % a.n_kv_heads == 0,
            "the query heads are no multiple of the KV heads");
    require(a.dim_k > 0 && a.dim_k <= max_dim && a.dim_v > 0 && a.dim_v <= max_dim,
            "a head dimension is out of range");
    require(a.window >= 0, "the window is negative");
    require(std::isfinite(a.scale), "the scale is not finite");
    require(std::isfinite(a.softcap) && a.softcap >= 0, "the soft cap is negative or not finite");
    require(a.n == 0 || (a.q && a.out && a.lse), "q or the output is missing");
    std::int64_t row = 0;
    for (const AttentionRun& run : a.runs) {
        require(run.start == row && run.n > 0 && run.n <= a.n - row,
                "the runs do not cover the queries in order");
        row += run.n;
        require(run.position >= 0 && run.position <= max_position - run.n, "a position is out of range");
        require(run.n_slots >= 0 && run.n_slots <= max_position, "the number of slots is out of range");
        require(0 <= run.first && run.first <= run.end && run.end <= max_position,
                "the held positions are out of range");
        require(run.end - run.first <= run.n_slots, "more positions are held than there are slots");
        check(run.k, a.dim_k, a.n_kv_heads, run.n_slots);
        check(run.v, a.dim_v, a.n_kv_heads, run.n_slots);
    }
    require(row == a.n, "the runs do not cover the queries in order");
}

// Memory for partial results, kept by each calling thread: asking the system for it anew costs as much as a
// short attention. What is larger than this is given back.
constexpr std::int64_t kept_floats = std::int64_t(8) << 20;

class Workspace {
  public:
    float* get(std::int64_t n) {
        if (n > size_) {
            memory_.reset();
            size_ = 0;
            memory_.reset(
                static_cast<float*>(std::aligned_alloc(64, static_cast<std::size_t>(n) * sizeof(float))));
            if (!memory_)
                throw std::bad_alloc();
            size_ = n;
        }
        return memory_.get();
    }

    void trim() {
        if (size_ > kept_floats) {
            memory_.reset();
            size_ = 0;
        }
    }

  private:
    struct Free {
        void operator()(float* memory) const { std::free(memory); }
    };
    std::unique_ptr<float, Free> memory_;
    std::int64_t size_ = 0;
};

} // namespace

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
    for (const InstructionSet& set : known_sets)
        if (usable(set))
            names.emplace_back(set.name);
    return names;
}

void attend(const Attention& work, int n_threads, const std::string& instruction_set) {
    check(work);
    require(n_threads > 0 && n_threads <= max_threads, "the number of threads is out of range");
    Plan plan(work, n_threads);
    std::vector<Kernel> kernels;
    for (const AttentionRun& run : work.runs)
        kernels.push_back(find_kernel(instruction_set, run.k, run.v));
    if (kernels.empty())
        find_kernel(instruction_set, Rows{nullptr, 0, 0, RowType::f32, 64},
                    Rows{nullptr, 0, 0, RowType::f32, 64});
    static thread_local Workspace workspace;
    float* const memory = workspace.get(plan.memory_floats());
    parallel_for(plan.n_parts(), n_threads,
                 [&](std::int64_t part) { plan.compute(part, kernels[plan.run_of(part)], memory); });
    workspace.trim();
}

} // namespace hybrid

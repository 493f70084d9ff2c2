#include "attention_plan.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace hybrid {

namespace {

// Queries of a part: each part reads its keys once for all of them, and their sums must stay in the cache.
constexpr std::int64_t part_queries = 16;
// Bytes of K in one slot that a part reads: a block of slots and the next one must stay in the cache.
constexpr std::int64_t part_row_bytes = 4096;
// Fewer keys than this are not split.
constexpr std::int64_t min_part_keys = 128;
// Parts for each thread: one that the system holds up then delays the others less.
constexpr std::int64_t parts_per_thread = 4;

} // namespace

std::int64_t row_bytes(RowType type, int dim) {
    switch (type) {
    case RowType::f32:
        return 4 * std::int64_t(dim);
    case RowType::f16:
    case RowType::bf16:
        return 2 * std::int64_t(dim);
    case RowType::q8_0:
        return std::int64_t(dim) / 32 * 34;
    }
    throw std::invalid_argument("a cache of unknown type");
}

Plan::Plan(const Attention& attention, int n_threads) : a_(attention) {
    double keys = 0; // read in all, times heads
    for (const AttentionRun& run : a_.runs) {
        const Keys all = seen(run, 0, run.n);
        keys += static_cast<double>(std::max<std::int64_t>(0, all.hi - all.lo)) * a_.n_kv_heads;
    }
    const double n_parts = n_threads > 1 ? static_cast<double>(n_threads * parts_per_thread) : 1;
    const double parts_per_key = keys > 0 ? n_parts / keys : 0;
    for (std::size_t i = 0; i < a_.runs.size(); ++i) {
        const AttentionRun& run = a_.runs[i];
        // Long chunks compute more than they read: there a head at a time, which leaves little to merge.
        const std::int64_t fitting =
            run.n >= part_queries ? 1 : part_row_bytes / row_bytes(run.k.type, a_.dim_k);
        const int heads = static_cast<int>(std::clamp<std::int64_t>(fitting, 1, a_.n_kv_heads));
        for (std::int64_t query = 0; query < run.n; query += part_queries)
            for (int head = 0; head < a_.n_kv_heads; head += heads)
                add(i, query, std::min(part_queries, run.n - query), head,
                    std::min(heads, a_.n_kv_heads - head), parts_per_key);
    }
}

Plan::Keys Plan::seen(const AttentionRun& run, std::int64_t query, std::int64_t n) const {
    const std::int64_t oldest = a_.window ? run.position + query - a_.window + 1 : 0;
    return {std::max(run.first, oldest), std::min(run.end, run.position + query + n)};
}

void Plan::add(std::size_t run, std::int64_t query, std::int64_t n, int first_head, int n_heads,
               double parts_per_key) {
    auto group = std::make_unique<Group>();
    group->run = run;
    group->query = query;
    group->n = n;
    group->first_head = first_head;
    group->n_heads = n_heads;
    group->rows = n * n_heads * (a_.n_heads / a_.n_kv_heads);
    group->first_part = n_parts();
    const Keys keys = seen(a_.runs[run], query, n);
    const std::int64_t n_keys = std::max<std::int64_t>(0, keys.hi - keys.lo);
    const auto share =
        static_cast<std::int64_t>(std::lround(static_cast<double>(n_keys) * n_heads * parts_per_key));
    const std::int64_t count =
        std::clamp<std::int64_t>(share, 1, std::max<std::int64_t>(1, n_keys / min_part_keys));
    const std::int64_t blocks = (n_keys + block_tokens - 1) / block_tokens;
    const std::int64_t step = (blocks + count - 1) / count * block_tokens;
    // The results and the scratch memory of a part; parts share no cache line.
    const std::int64_t floats =
        (group->rows * (a_.dim_v + 2) + scratch_floats(group->rows, a_.dim_k, a_.dim_v) + 15) / 16 * 16;
    std::int64_t at = 0;
    do { // one part even without keys: it says that there is nothing to see
        parts_.push_back(
            {groups_.size(), keys.lo + at, keys.lo + std::min(n_keys, at + step), memory_floats_});
        memory_floats_ += floats;
        at += step;
    } while (at < n_keys);
    group->n_parts = n_parts() - group->first_part;
    group->left.store(group->n_parts, std::memory_order_relaxed);
    groups_.push_back(std::move(group));
}

Task Plan::task_of(const Part& part, float* memory) const {
    const Group& group = *groups_[part.group];
    const AttentionRun& run = a_.runs[group.run];
    Task task{};
    task.q = a_.q + (run.start + group.query) * a_.n_heads * a_.dim_k;
    task.n = group.n;
    task.position = run.position + group.query;
    task.n_heads = a_.n_heads;
    task.group = a_.n_heads / a_.n_kv_heads;
    task.first_head = group.first_head;
    task.n_kv_heads = group.n_heads;
    task.k = run.k;
    task.v = run.v;
    task.n_slots = run.n_slots;
    task.lo = part.lo;
    task.hi = part.hi;
    task.scale = a_.scale;
    task.softcap = a_.softcap;
    task.window = a_.window;
    task.scratch = memory + part.offset;
    task.out = task.scratch + scratch_floats(group.rows, a_.dim_k, a_.dim_v);
    task.peak = task.out + group.rows * a_.dim_v;
    task.sum = task.peak + group.rows;
    return task;
}

void Plan::compute(std::int64_t part, Kernel kernel, float* memory) {
    kernel(task_of(parts_[part], memory));
    Group& group = *groups_[parts_[part].group];
    if (group.left.fetch_sub(1, std::memory_order_acq_rel) == 1)
        merge(group, memory);
}

void Plan::merge(const Group& group, float* memory) const {
    std::vector<Task> parts;
    for (std::int64_t i = 0; i < group.n_parts; ++i)
        parts.push_back(task_of(parts_[group.first_part + i], memory));
    const int heads = group.n_heads * (a_.n_heads / a_.n_kv_heads);
    const int first_head = group.first_head * (a_.n_heads / a_.n_kv_heads);
    const std::int64_t first_row = a_.runs[group.run].start + group.query;
    for (std::int64_t row = 0; row < group.rows; ++row) {
        const std::int64_t head = first_head + row % heads;
        const std::int64_t target = (first_row + row / heads) * a_.n_heads + head;
        float top = a_.sinks ? a_.sinks[head] : -std::numeric_limits<float>::infinity();
        for (const Task& part : parts)
            top = std::max(top, part.peak[row]);
        const float base = std::max(top, std::numeric_limits<float>::lowest());
        float sum = a_.sinks ? std::exp(a_.sinks[head] - base) : 0.0F;
        float* const out = a_.out + target * a_.dim_v;
        std::fill_n(out, a_.dim_v, 0.0F);
        for (const Task& part : parts) {
            const float weight = std::exp(part.peak[row] - base);
            sum += weight * part.sum[row];
            const float* const values = part.out + row * a_.dim_v;
            for (int i = 0; i < a_.dim_v; ++i)
                out[i] += weight * values[i];
        }
        if (sum != 0.0F) // NaN goes through
            for (int i = 0; i < a_.dim_v; ++i)
                out[i] /= sum;
        a_.lse[target] = top + std::log(sum);
    }
}

} // namespace hybrid

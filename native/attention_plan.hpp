// How the work of one attention is cut into parts that threads take one after the other, and put together
// again.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention.hpp"

namespace hybrid {

// Bytes of one head's row. Throws std::invalid_argument for a type that does not exist.
std::int64_t row_bytes(RowType type, int dim);

// Cuts the runs into groups of queries and KV heads, and the keys of a group into parts. A part leaves
// unnormalised sums in its own memory; whichever thread ends the last part of a group merges them, always in
// the same order.
class Plan {
  public:
    Plan(const Attention& attention, int n_threads);

    std::int64_t n_parts() const { return static_cast<std::int64_t>(parts_.size()); }
    std::size_t run_of(std::int64_t part) const { return groups_[parts_[part].group]->run; }
    std::int64_t memory_floats() const { return memory_floats_; }

    // memory holds memory_floats() floats, aligned to 64 bytes. Called once for each part.
    void compute(std::int64_t part, Kernel kernel, float* memory);

  private:
    struct Group {
        std::size_t run;
        std::int64_t query, n;   // queries query … query + n - 1 of the run
        int first_head, n_heads; // KV heads
        std::int64_t rows;       // n * query heads
        std::int64_t first_part, n_parts;
        std::atomic<std::int64_t> left; // parts still to be computed
    };

    struct Part {
        std::size_t group;
        std::int64_t lo, hi; // positions of its keys
        std::int64_t offset; // of its memory
    };

    struct Keys {
        std::int64_t lo, hi; // positions that some of the queries see; hi <= lo if there are none
    };

    Keys seen(const AttentionRun& run, std::int64_t query, std::int64_t n) const;
    void add(std::size_t run, std::int64_t query, std::int64_t n, int first_head, int n_heads,
             double parts_per_key);
    Task task_of(const Part& part, float* memory) const;
    void merge(const Group& group, float* memory) const;

    const Attention& a_;
    std::vector<std::unique_ptr<Group>> groups_;
    std::vector<Part> parts_;
    std::int64_t memory_floats_ = 0;
};

} // namespace hybrid

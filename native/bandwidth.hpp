// How fast memory can be read.
#pragma once

#include <cstdint>
#include <functional>

namespace hybrid {

// Bytes a second, from the quickest of the passes over n_bytes of fresh memory that fit into `seconds` (two
// at least), n_threads threads reading a part each. n_bytes should be several times the last cache. Throws
// std::invalid_argument for sizes out of range, std::bad_alloc if there is no such memory. `between` is
// called on the caller's thread after every piece of the memory that is written and every pass; what it
// throws ends the measurement.
double read_bandwidth(
    std::int64_t n_bytes, int n_threads, double seconds, const std::function<void()>& between = [] {});

} // namespace hybrid

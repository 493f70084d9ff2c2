// Threads for short parallel work. They sleep between jobs; a forked child starts with none and makes its
// own.
#pragma once

#include <cstdint>
#include <functional>

namespace hybrid {

// Calls work(i) for every i in 0 … n - 1, on at most n_threads threads, one of which is the caller's. Which
// thread does which i is left to chance. Jobs of several callers run one after the other. What work throws
// first is thrown here, after all of them have ended.
void parallel_for(std::int64_t n, int n_threads, const std::function<void(std::int64_t)>& work);

} // namespace hybrid

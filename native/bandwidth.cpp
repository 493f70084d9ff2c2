#include "bandwidth.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>

#include <sys/mman.h>

#include "pool.hpp"

namespace hybrid {

namespace {

constexpr std::int64_t line = 64;
constexpr std::int64_t ahead = 4096; // how far to prefetch
constexpr std::int64_t page = 4096;
constexpr std::int64_t piece = 16 << 20; // written by a thread before the caller is asked

struct Unmap {
    std::size_t size;
    void operator()(char* memory) const { ::munmap(memory, size); }
};

// Reads one word of every cache line: what counts is the line's way from memory, whatever the processor's
// vectors.
std::uint64_t read_lines(const char* at, std::int64_t n) {
    std::uint64_t sums[4] = {};
    for (std::int64_t i = 0; i + 4 * line <= n; i += 4 * line)
        for (int j = 0; j < 4; ++j) {
            __builtin_prefetch(at + i + j * line + ahead);
            std::uint64_t word;
            std::memcpy(&word, at + i + j * line, sizeof word);
            sums[j] += word;
        }
    return sums[0] + sums[1] + sums[2] + sums[3];
}

} // namespace

double read_bandwidth(std::int64_t n_bytes, int n_threads, double seconds,
                      const std::function<void()>& between) {
    if (n_threads < 1 || n_threads > 1024 || n_bytes < n_threads * page || n_bytes > std::int64_t(1) << 40)
        throw std::invalid_argument("the number of threads or bytes to read is out of range");
    const auto size = static_cast<std::size_t>(n_bytes);
    void* const mapped = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED)
        throw std::bad_alloc();
    const std::unique_ptr<char, Unmap> memory(static_cast<char*>(mapped), Unmap{size});
#if defined(MADV_HUGEPAGE)
    ::madvise(mapped, size, MADV_HUGEPAGE); // a hint
#endif
    const std::int64_t share = n_bytes / n_threads / page * page;
    // Written first: untouched pages are all one page of zeros.
    for (std::int64_t done = 0; done < share; done += piece) {
        const std::int64_t n = std::min(piece, share - done);
        parallel_for(n_threads, n_threads, [&](std::int64_t i) {
            std::memset(memory.get() + i * share + done, 1, static_cast<std::size_t>(n));
        });
        between();
    }
    std::atomic<std::uint64_t> sum{0}; // the compiler may not leave the reading out
    using Clock = std::chrono::steady_clock;
    const auto end = Clock::now() + std::chrono::duration<double>(seconds);
    double best = 0;
    for (int pass = 0; pass < 2 || Clock::now() < end; ++pass) {
        const auto start = Clock::now();
        parallel_for(n_threads, n_threads,
                     [&](std::int64_t i) { sum += read_lines(memory.get() + i * share, share); });
        const std::chrono::duration<double> taken = Clock::now() - start;
        best = std::max(best, static_cast<double>(share * n_threads) / std::max(taken.count(), 1e-9));
        between();
    }
    return best;
}

} // namespace hybrid

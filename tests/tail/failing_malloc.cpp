// Preloaded, it makes the n-th allocation fail that llama.cpp asks for, and tells them apart. Only calls out of
// llama.cpp's own libraries count, so that Python and numpy get their memory.
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <unordered_set>
#include <vector>

#include <execinfo.h>
#include <link.h>

extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);
}

namespace {

constexpr int most_ranges = 8, most_frames = 64;
struct {
    std::uintptr_t begin, end;
} ranges[most_ranges];
int n_ranges = 0;
std::atomic<bool> armed{false};
std::atomic<std::size_t> seen{0};
std::size_t fail_at = 0, least = 0;
std::mutex mutex;
thread_local bool inside = false;

int add_range(dl_phdr_info* info, std::size_t, void*) {
    if (!std::strstr(info->dlpi_name, "libllama") && !std::strstr(info->dlpi_name, "libggml"))
        return 0;
    for (int i = 0; i < info->dlpi_phnum && n_ranges < most_ranges; ++i) {
        const auto& header = info->dlpi_phdr[i];
        if (header.p_type == PT_LOAD && (header.p_flags & PF_X) != 0) {
            const std::uintptr_t begin = info->dlpi_addr + header.p_vaddr;
            ranges[n_ranges++] = {begin, begin + header.p_memsz};
        }
    }
    return 0;
}

bool is_llama(const void* address) {
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    for (int i = 0; i < n_ranges; ++i)
        if (at >= ranges[i].begin && at < ranges[i].end)
            return true;
    return false;
}

struct Sites {
    std::unordered_set<std::uint64_t> known;
    std::vector<std::size_t> first;
};

Sites& sites() {
    static Sites* const made = new Sites;
    return *made;
}

// Remembers the chain of callers, as far as it lies in llama.cpp, and the number of its first allocation.
void note(std::size_t number) {
    void* frames[most_frames];
    const int n = ::backtrace(frames, most_frames);
    std::uint64_t hash = 1469598103934665603U;
    for (int i = 0; i < n; ++i)
        if (is_llama(frames[i]))
            hash = (hash ^ reinterpret_cast<std::uintptr_t>(frames[i])) * 1099511628211U;
    const std::lock_guard<std::mutex> lock(mutex);
    if (sites().known.insert(hash).second)
        sites().first.push_back(number);
}

bool fails(std::size_t n, const void* caller) {
    if (!armed || inside || n < least || !is_llama(caller))
        return false;
    const std::size_t number = ++seen;
    if (fail_at == 0) {
        inside = true;
        note(number);
        inside = false;
    }
    return number == fail_at;
}

} // namespace

extern "C" {

// From now on the n-th allocation of at least so many bytes fails, counted from 1; n = 0: none, but they are told apart.
void failing_arm(std::size_t n, std::size_t least_bytes) {
    void* frame[1];
    ::backtrace(frame, 1); // loads what it needs
    sites().known.clear();
    sites().first.clear();
    n_ranges = 0;
    dl_iterate_phdr(add_range, nullptr);
    seen = 0;
    fail_at = n;
    least = least_bytes;
    armed = true;
}

// Copies the numbers of the first allocation of every kind; returns how many there are.
std::size_t failing_sites(std::size_t* out, std::size_t most) {
    armed = false;
    for (std::size_t i = 0; i < sites().first.size() && i < most; ++i)
        out[i] = sites().first[i];
    return sites().first.size();
}

void* malloc(std::size_t n) {
    return fails(n, __builtin_return_address(0)) ? nullptr : __libc_malloc(n);
}

void* calloc(std::size_t n, std::size_t size) {
    return fails(n * size, __builtin_return_address(0)) ? nullptr : __libc_calloc(n, size);
}

void* realloc(void* old, std::size_t n) {
    return fails(n, __builtin_return_address(0)) ? nullptr : __libc_realloc(old, n);
}

int posix_memalign(void** out, std::size_t alignment, std::size_t n) {
    if (fails(n, __builtin_return_address(0)))
        return ENOMEM;
    *out = __libc_memalign(alignment, n);
    return *out ? 0 : ENOMEM;
}

} // extern "C"

void* operator new(std::size_t n) {
    void* const made = fails(n, __builtin_return_address(0)) ? nullptr : __libc_malloc(n ? n : 1);
    if (!made)
        throw std::bad_alloc();
    return made;
}

void* operator new[](std::size_t n) {
    void* const made = fails(n, __builtin_return_address(0)) ? nullptr : __libc_malloc(n ? n : 1);
    if (!made)
        throw std::bad_alloc();
    return made;
}

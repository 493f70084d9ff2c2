#include "callbacks.hpp"

#include <algorithm>
#include <cstring>

#include <pthread.h>

namespace hybrid {

namespace {

constexpr std::size_t max_lines = 2048;
constexpr int level_debug = 1;     // GGML_LOG_LEVEL_DEBUG
constexpr int level_continued = 5; // GGML_LOG_LEVEL_CONT

std::uint64_t this_thread() {
    return (std::uint64_t)(::pthread_self()); // a pointer on some systems, a number on others
}

} // namespace

Log& Log::instance() {
    static Log* log = new Log;
    return *log;
}

void Log::append(int level, const char* text) {
    if (level == level_debug)
        return;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (level != level_continued) {
        partial_.level = level;
        partial_.thread = this_thread();
    }
    for (const char* end; (end = std::strchr(text, '\n')); text = end + 1) {
        partial_.text.append(text, end);
        lines_.push_back(partial_);
        partial_.text.clear();
        ++count_;
        if (lines_.size() > max_lines)
            lines_.pop_front();
    }
    partial_.text.append(text);
}

std::uint64_t Log::count() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return count_;
}

std::vector<Log::Line> Log::since(std::uint64_t mark) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::uint64_t wanted = count_ - std::min(mark, count_);
    return {lines_.end() - static_cast<std::ptrdiff_t>(std::min<std::uint64_t>(wanted, lines_.size())),
            lines_.end()};
}

} // namespace hybrid

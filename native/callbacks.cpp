#include "callbacks.hpp"

#include <algorithm>
#include <cstring>

namespace hybrid {

namespace {

constexpr std::size_t max_lines = 2048;
constexpr int level_continued = 5; // GGML_LOG_LEVEL_CONT

} // namespace

Log& Log::instance() {
    static Log* log = new Log;
    return *log;
}

void Log::append(int level, const char* text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (level != level_continued)
        partial_.first = level;
    for (const char* end; (end = std::strchr(text, '\n')); text = end + 1) {
        partial_.second.append(text, end);
        lines_.push_back(std::move(partial_));
        partial_ = {level, ""};
        ++count_;
        if (lines_.size() > max_lines)
            lines_.pop_front();
    }
    partial_.second.append(text);
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

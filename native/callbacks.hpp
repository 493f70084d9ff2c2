// What llama.cpp calls back while it works, without Python: its threads never wait for the interpreter lock.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

namespace hybrid {

// A flag that stops a load or an evaluation from another thread, and how far a load has come.
class Interrupt {
  public:
    void set(bool stop) { stop_.store(stop, std::memory_order_relaxed); }
    bool is_set() const { return stop_.load(std::memory_order_relaxed); }
    float progress() const { return progress_.load(std::memory_order_relaxed); }

    // ggml_abort_callback: true stops the computation.
    static bool on_abort(void* self) { return static_cast<Interrupt*>(self)->is_set(); }

    // llama_progress_callback: false stops the load.
    static bool on_progress(float fraction, void* self) {
        auto* interrupt = static_cast<Interrupt*>(self);
        interrupt->progress_.store(fraction, std::memory_order_relaxed);
        return !interrupt->is_set();
    }

  private:
    std::atomic<bool> stop_{false};
    std::atomic<float> progress_{0.0F};
};

// The latest lines of llama.cpp's log.
class Log {
  public:
    struct Line {
        int level = 0;            // ggml_log_level
        std::uint64_t thread = 0; // who logged it, as Python's threading.get_ident() tells it
        std::string text;         // without its newline
    };

    // llama.cpp logs until the process ends, so the one Log is never destroyed.
    static Log& instance();

    // ggml_log_callback.
    static void on_line(int level, const char* text, void*) { instance().append(level, text); }

    std::uint64_t count() const; // lines ever finished
    std::vector<Line> since(std::uint64_t mark) const;

  private:
    void append(int level, const char* text);

    mutable std::mutex mutex_;
    std::deque<Line> lines_;
    std::uint64_t count_ = 0;
    Line partial_;
};

} // namespace hybrid

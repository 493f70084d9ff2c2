#include "pool.hpp"

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

#include <pthread.h>

namespace hybrid {

namespace {

struct Job {
    std::int64_t n;
    const std::function<void(std::int64_t)>& work;
    std::atomic<std::int64_t> next{0};
    std::mutex mutex;
    std::exception_ptr failure;

    void take_part() {
        try {
            for (std::int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;)
                work(i);
        } catch (...) {
            next.store(n, std::memory_order_relaxed); // nobody begins another part
            const std::lock_guard<std::mutex> lock(mutex);
            if (!failure)
                failure = std::current_exception();
        }
    }
};

class Pool {
  public:
    // Never destroyed: its threads sleep until the process ends.
    static Pool*& instance() {
        static Pool* pool = [] {
            // The child has only the forking thread. Locks and threads of the old pool are lost there.
            ::pthread_atfork(nullptr, nullptr, [] { instance() = new Pool; });
            return new Pool;
        }();
        return pool;
    }

    void run(Job& job, int helpers) {
        const std::lock_guard<std::mutex> one_at_a_time(job_mutex_);
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            while (n_threads_ < helpers && start_thread())
                ;
            job_ = &job;
            wanted_ = helpers < n_threads_ ? helpers : n_threads_;
            wake_.notify_all();
        }
        job.take_part();
        std::unique_lock<std::mutex> lock(mutex_);
        wanted_ = 0; // who has not come yet need not
        job_ = nullptr;
        done_.wait(lock, [this] { return busy_ == 0; });
    }

  private:
    bool start_thread() {
        try {
            std::thread([this] { serve(); }).detach();
        } catch (const std::system_error&) {
            return false; // as many as the system allows
        }
        ++n_threads_;
        return true;
    }

    void serve() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [this] { return wanted_ > 0; });
            --wanted_;
            ++busy_;
            Job* const job = job_;
            lock.unlock();
            job->take_part();
            lock.lock();
            if (--busy_ == 0)
                done_.notify_one();
        }
    }

    std::mutex job_mutex_;
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    Job* job_ = nullptr;
    int wanted_ = 0, busy_ = 0, n_threads_ = 0;
};

} // namespace

void parallel_for(std::int64_t n, int n_threads, const std::function<void(std::int64_t)>& work) {
    Job job{n, work, {}, {}, {}};
    const std::int64_t helpers = (n < n_threads ? n : n_threads) - 1;
    if (helpers > 0)
        Pool::instance()->run(job, static_cast<int>(helpers));
    else
        job.take_part();
    if (job.failure)
        std::rethrow_exception(job.failure);
}

} // namespace hybrid

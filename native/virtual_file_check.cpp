// virtual_file_check [N]: N virtual files of random segments (2,000 by default), sound and unsound ones, each
// read and sought in ways that llama.cpp would and would not, against the plain concatenation of their
// pieces; and the log that several threads write at once. Built with sanitizers (make sanitize). Exits with 1
// at the first difference.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include "callbacks.hpp"
#include "virtual_file.hpp"

using namespace hybrid;

namespace {

constexpr std::int64_t huge = std::numeric_limits<std::int64_t>::max();

std::mt19937 generator(1);

std::int64_t pick(std::int64_t lo, std::int64_t hi) {
    return std::uniform_int_distribution<std::int64_t>(lo, hi)(generator);
}

std::string random_bytes(std::int64_t n) {
    std::string bytes(static_cast<std::size_t>(n), '\0');
    for (char& byte : bytes)
        byte = static_cast<char>(pick(0, 255));
    return bytes;
}

// A file on the disk that is gone when the process ends.
struct Disk {
    std::string bytes = random_bytes(100'000);
    int fd;

    Disk() {
        char name[] = "/tmp/virtual_file_check_XXXXXX";
        fd = ::mkstemp(name);
        if (fd < 0 || ::unlink(name) != 0 ||
            ::write(fd, bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size()))
            throw std::runtime_error("no room for a temporary file");
    }
    ~Disk() { ::close(fd); }
};

struct Case {
    std::vector<Segment> segments;
    std::string expected;

    explicit Case(const Disk& disk) {
        for (std::int64_t n = pick(0, 8); n > 0; --n) {
            const std::int64_t kind = pick(0, 2);
            if (kind == 0) {
                const std::string bytes = random_bytes(pick(0, 300));
                segments.emplace_back(bytes);
                expected += bytes;
            } else if (kind == 1) {
                const auto offset =
                    static_cast<std::uint64_t>(pick(0, static_cast<std::int64_t>(disk.bytes.size())));
                const auto length = static_cast<std::uint64_t>(
                    pick(0, static_cast<std::int64_t>(disk.bytes.size() - offset)));
                segments.emplace_back(FileRange{disk.fd, offset, length});
                expected += disk.bytes.substr(offset, length);
            } else {
                const auto length = static_cast<std::uint64_t>(pick(0, 9000));
                segments.emplace_back(Zeros{length});
                expected.append(length, '\0');
            }
        }
    }
};

bool reads_like(const VirtualFile& file, const std::string& expected) {
    const auto size = static_cast<std::int64_t>(expected.size());
    if (file.size() != expected.size())
        return false;
    for (int i = 0; i < 6; ++i) {
        const auto offset = static_cast<std::uint64_t>(i == 0 ? 0 : i == 1 ? huge : pick(0, size + 10));
        const auto n = static_cast<std::size_t>(i == 0 ? size : pick(0, size + 10));
        std::vector<char> out(n, '\xff'); // of exactly the size that is asked for
        const std::size_t got = file.read(offset, out.data(), n);
        const std::string want = offset < expected.size() ? expected.substr(offset, n) : "";
        if (std::string(out.data(), got) != want)
            return false;
    }
    return true;
}

bool seeks_like(VirtualFile& file, const std::string& expected) {
    const auto size = static_cast<std::int64_t>(expected.size());
    std::FILE* const stream = file.stream();
    for (int i = 0; i < 12; ++i) {
        const std::int64_t target = pick(0, size);
        const int whence = static_cast<int>(pick(0, 2));
        const std::int64_t base = whence == SEEK_CUR   ? ::ftello(stream)
                                  : whence == SEEK_END ? size
                                                       : std::int64_t{0};
        if (::fseeko(stream, target - base, whence) != 0 || ::ftello(stream) != target)
            return false;
        std::vector<char> out(static_cast<std::size_t>(pick(0, 9000)), '\xff');
        const std::size_t got = std::fread(out.data(), 1, out.size(), stream);
        if (std::string(out.data(), got) != expected.substr(static_cast<std::size_t>(target), out.size()))
            return false;
    }
    for (const std::int64_t absurd : {huge, -huge - 1, size + 1, std::int64_t{-1}})
        if (::fseeko(stream, absurd, SEEK_SET) == 0)
            return false;
    return file.error().empty();
}

bool refuses(std::vector<Segment> segments) {
    try {
        const VirtualFile file(std::move(segments));
    } catch (const std::invalid_argument&) {
        return true;
    } catch (const std::system_error&) {
        return true;
    }
    return false;
}

bool refuses_nonsense(const Disk& disk) {
    const std::uint64_t size = disk.bytes.size(), most = std::numeric_limits<std::uint64_t>::max();
    return refuses({FileRange{disk.fd, size, 1}}) && refuses({FileRange{disk.fd, 0, size + 1}}) &&
           refuses({FileRange{disk.fd, most, 1}}) && refuses({FileRange{disk.fd, 1, most}}) &&
           refuses({FileRange{-1, 0, 1}}) && refuses({FileRange{1 << 20, 0, 0}}) && refuses({Zeros{most}}) &&
           refuses({Zeros{static_cast<std::uint64_t>(huge)}, std::string("x")});
}

// What is read after the file was cut short is an error that says so, and nothing beyond it is touched.
bool survives_truncation() {
    Disk disk;
    VirtualFile file({std::string("head"), FileRange{disk.fd, 0, disk.bytes.size()}, Zeros{10}});
    if (::ftruncate(disk.fd, 100) != 0)
        return false;
    std::vector<char> out(disk.bytes.size());
    const std::size_t got = std::fread(out.data(), 1, out.size(), file.stream());
    return got < out.size() && std::ferror(file.stream()) && !file.error().empty();
}

bool log_keeps_lines() {
    const std::uint64_t before = Log::instance().count();
    std::vector<std::thread> writers;
    for (int i = 0; i < 4; ++i)
        writers.emplace_back([] {
            for (int line = 0; line < 500; ++line) {
                Log::on_line(2, "a line\n", nullptr);
                Log::on_line(2, "two\nlines\n", nullptr);
                Log::instance().since(Log::instance().count() - 3);
            }
        });
    for (std::thread& writer : writers)
        writer.join();
    return Log::instance().count() - before == 4 * 500 * 3 && Log::instance().since(0).size() <= 2048;
}

bool interrupts() {
    Interrupt interrupt;
    std::thread load([&] {
        for (float done = 0; Interrupt::on_progress(done, &interrupt);)
            done = std::min(1.0F, done + 0.001F);
    });
    while (interrupt.progress() < 0.5F)
        std::this_thread::yield();
    interrupt.set(true);
    load.join();
    return Interrupt::on_abort(&interrupt);
}

} // namespace

int main(int argc, char** argv) {
    const int n = argc > 1 ? std::atoi(argv[1]) : 2000;
    const Disk disk;
    for (int i = 0; i < n; ++i) {
        const Case c(disk);
        VirtualFile file(c.segments);
        if (!reads_like(file, c.expected) || !seeks_like(file, c.expected)) {
            std::printf("virtual file %d differs\n", i);
            return 1;
        }
    }
    if (!refuses_nonsense(disk) || !survives_truncation() || !log_keeps_lines() || !interrupts()) {
        std::printf("nonsense was not refused, or the log lost lines\n");
        return 1;
    }
    std::printf("%d virtual files agree\n", n);
    return 0;
}

// A read-only FILE* over pieces that lie elsewhere: bytes in memory, ranges of open files, runs of zeros.
// llama.cpp loads a slice of a model through it with nothing written and no second copy.
#pragma once

#include <cstdint>
#include <cstdio>
#include <map>
#include <string>
#include <variant>
#include <vector>

namespace hybrid {

struct FileRange {
    int fd;
    std::uint64_t offset;
    std::uint64_t length;
};

struct Zeros {
    std::uint64_t length;
};

using Segment = std::variant<std::string, FileRange, Zeros>;

class VirtualFile {
  public:
    // Duplicates the descriptors, so the caller may close its own.
    // Throws std::invalid_argument for a range that does not lie in its file, std::system_error from the
    // system.
    explicit VirtualFile(std::vector<Segment> segments);
    ~VirtualFile();
    VirtualFile(const VirtualFile&) = delete;
    VirtualFile& operator=(const VirtualFile&) = delete;

    std::uint64_t size() const { return starts_.back(); }
    std::FILE* stream() const { return stream_; }
    const std::string& error() const { return error_; }

    // Copies up to n bytes from offset on; fewer only at the end. Throws std::runtime_error if a file fails.
    std::size_t read(std::uint64_t offset, char* out, std::size_t n) const;

    void close();

    // What the FILE* calls. They must not throw: a failure is kept for error() and reported through errno.
    std::int64_t read_next(char* out, std::size_t n);
    std::int64_t seek(std::int64_t offset, int whence);

  private:
    void adopt_descriptors();
    void open_stream();

    std::vector<Segment> segments_;
    std::vector<std::uint64_t> starts_; // where each segment begins, and the end of the last
    std::map<int, int> descriptors_;    // the caller's -> ours
    std::uint64_t position_ = 0;
    std::FILE* stream_ = nullptr;
    std::string error_;
};

} // namespace hybrid

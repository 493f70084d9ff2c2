#include "virtual_file.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <system_error>

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

namespace hybrid {

namespace {

constexpr std::uint64_t max_size = std::numeric_limits<std::int64_t>::max();
constexpr std::size_t stream_buffer = 64 * 1024;
constexpr std::size_t page = 4096;

[[noreturn]] void throw_errno(const char* what) {
    throw std::system_error(errno, std::generic_category(), what);
}

std::uint64_t length_of(const Segment& segment) {
    if (const auto* bytes = std::get_if<std::string>(&segment))
        return bytes->size();
    if (const auto* range = std::get_if<FileRange>(&segment))
        return range->length;
    return std::get<Zeros>(segment).length;
}

void read_fully(int fd, std::uint64_t offset, char* out, std::size_t n) {
    while (n > 0) {
        const ssize_t got = ::pread(fd, out, n, static_cast<off_t>(offset));
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            throw_errno("cannot read the model file");
        if (got == 0)
            throw std::runtime_error("the model file ended early: it was truncated while it was being read");
        out += got;
        offset += static_cast<std::uint64_t>(got);
        n -= static_cast<std::size_t>(got);
    }
}

// Freshly mapped memory reads as zero without being allocated, so only what is not zero yet is written:
// a tensor of zeros then costs no RAM.
void make_zero(char* out, std::size_t n) {
    static const char zeros[page] = {};
    while (n > 0) {
        const std::size_t step = std::min(n, page - reinterpret_cast<std::uintptr_t>(out) % page);
        if (std::memcmp(out, zeros, step) != 0)
            std::memset(out, 0, step);
        out += step;
        n -= step;
    }
}

#if defined(__linux__)
ssize_t cookie_read(void* cookie, char* out, std::size_t n) {
    return static_cast<VirtualFile*>(cookie)->read_next(out, n);
}

int cookie_seek(void* cookie, off64_t* offset, int whence) {
    const std::int64_t position = static_cast<VirtualFile*>(cookie)->seek(*offset, whence);
    if (position < 0)
        return -1;
    *offset = position;
    return 0;
}
#else
int cookie_read(void* cookie, char* out, int n) {
    return static_cast<int>(static_cast<VirtualFile*>(cookie)->read_next(out, static_cast<std::size_t>(n)));
}

fpos_t cookie_seek(void* cookie, fpos_t offset, int whence) {
    return static_cast<VirtualFile*>(cookie)->seek(offset, whence);
}
#endif

} // namespace

VirtualFile::VirtualFile(std::vector<Segment> segments) : segments_(std::move(segments)), starts_{0} {
    for (const Segment& segment : segments_) {
        if (length_of(segment) > max_size - size())
            throw std::invalid_argument("the virtual file is longer than a file can be");
        starts_.push_back(size() + length_of(segment));
    }
    try {
        adopt_descriptors();
        open_stream();
    } catch (...) {
        close();
        throw;
    }
}

VirtualFile::~VirtualFile() {
    close();
}

void VirtualFile::adopt_descriptors() {
    for (Segment& segment : segments_) {
        auto* range = std::get_if<FileRange>(&segment);
        if (!range)
            continue;
        auto known = descriptors_.find(range->fd);
        if (known == descriptors_.end()) {
            const int ours = ::fcntl(range->fd, F_DUPFD_CLOEXEC, 0);
            if (ours < 0)
                throw_errno("cannot use the model file's descriptor");
            known = descriptors_.emplace(range->fd, ours).first;
        }
        range->fd = known->second;
        struct stat status;
        if (::fstat(range->fd, &status) != 0)
            throw_errno("cannot look at the model file");
        const auto file_size = static_cast<std::uint64_t>(status.st_size);
        if (range->offset > file_size || range->length > file_size - range->offset)
            throw std::invalid_argument("a segment lies outside its file");
    }
}

void VirtualFile::open_stream() {
#if defined(__linux__)
    stream_ = ::fopencookie(this, "rb", {cookie_read, nullptr, cookie_seek, nullptr});
#else
    stream_ = ::funopen(this, cookie_read, nullptr, cookie_seek, nullptr);
#endif
    if (!stream_)
        throw_errno("cannot open the virtual file");
    std::setvbuf(stream_, nullptr, _IOFBF, stream_buffer);
}

void VirtualFile::close() {
    if (stream_)
        std::fclose(stream_);
    stream_ = nullptr;
    for (const auto& [theirs, ours] : descriptors_)
        ::close(ours);
    descriptors_.clear();
    segments_.clear();
    starts_ = {0};
}

std::size_t VirtualFile::read(std::uint64_t offset, char* out, std::size_t n) const {
    if (offset >= size())
        return 0;
    n = static_cast<std::size_t>(std::min<std::uint64_t>(n, size() - offset));
    // The last segment that begins at or before offset; empty segments before it end there too.
    std::size_t i = std::upper_bound(starts_.begin(), starts_.end(), offset) - starts_.begin() - 1;
    for (std::size_t done = 0; done < n; ++i) {
        const std::uint64_t within = offset + done - starts_[i];
        const auto step =
            static_cast<std::size_t>(std::min<std::uint64_t>(n - done, starts_[i + 1] - starts_[i] - within));
        if (const auto* bytes = std::get_if<std::string>(&segments_[i]))
            std::memcpy(out + done, bytes->data() + within, step);
        else if (const auto* range = std::get_if<FileRange>(&segments_[i]))
            read_fully(range->fd, range->offset + within, out + done, step);
        else
            make_zero(out + done, step);
        done += step;
    }
    return n;
}

std::int64_t VirtualFile::read_next(char* out, std::size_t n) {
    try {
        const std::size_t got = read(position_, out, n);
        position_ += got;
        return static_cast<std::int64_t>(got);
    } catch (const std::exception& failure) {
        error_ = failure.what();
        errno = EIO;
        return -1;
    }
}

std::int64_t VirtualFile::seek(std::int64_t offset, int whence) {
    const std::uint64_t base = whence == SEEK_CUR ? position_ : whence == SEEK_END ? size() : 0;
    const bool known = whence == SEEK_SET || whence == SEEK_CUR || whence == SEEK_END;
    // size() fits in an int64, so base + offset can only leave the file, never wrap.
    const std::int64_t lowest = -static_cast<std::int64_t>(base);
    if (!known || offset < lowest || offset > static_cast<std::int64_t>(size() - base)) {
        errno = EINVAL;
        return -1;
    }
    position_ = base + static_cast<std::uint64_t>(offset);
    return static_cast<std::int64_t>(position_);
}

} // namespace hybrid

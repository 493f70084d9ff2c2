// A libFuzzer target (make fuzz-coverage): virtual files of segments that the fuzzer chooses, sound and
// unsound ones, read and sought at its whim, against a byte by byte idea of what they hold; the file below
// them may be cut off meanwhile. Aborts at the first difference.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include <fuzzer/FuzzedDataProvider.h>

#include "virtual_file.hpp"

using namespace hybrid;

namespace {

constexpr std::uint64_t disk_size = 20'000;
constexpr std::size_t most_read = 70'000; // more than the stream's buffer
constexpr auto most = std::numeric_limits<std::uint64_t>::max();
constexpr auto longest = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());

void demand(bool condition, const char* what) {
    if (condition)
        return;
    std::fprintf(stderr, "wrong: %s\n", what);
    std::abort();
}

char disk_byte(std::uint64_t offset) {
    return static_cast<char>(offset * 31 + offset / 256 + 1);
}

// A file of known bytes that is gone when the process ends, whole again for each input.
int disk() {
    static const int fd = [] {
        char name[] = "/tmp/virtual_file_fuzz_XXXXXX";
        const int made = ::mkstemp(name);
        demand(made >= 0 && ::unlink(name) == 0, "no room for a temporary file");
        return made;
    }();
    static const std::string bytes = [] {
        std::string made(disk_size, '\0');
        for (std::uint64_t i = 0; i < disk_size; ++i)
            made[i] = disk_byte(i);
        return made;
    }();
    if (::lseek(fd, 0, SEEK_END) != static_cast<off_t>(disk_size))
        demand(::pwrite(fd, bytes.data(), disk_size, 0) == static_cast<ssize_t>(disk_size),
               "the disk is full");
    return fd;
}

// A number near something that matters, or any.
std::uint64_t number(FuzzedDataProvider& input) {
    switch (input.ConsumeIntegralInRange(0, 4)) {
    case 0:
        return input.ConsumeIntegralInRange<std::uint64_t>(0, 300);
    case 1:
        return input.ConsumeIntegralInRange<std::uint64_t>(0, disk_size + 1);
    case 2:
        return longest - input.ConsumeIntegralInRange<std::uint64_t>(0, 300);
    case 3:
        return most - input.ConsumeIntegralInRange<std::uint64_t>(0, 300);
    default:
        return input.ConsumeIntegral<std::uint64_t>();
    }
}

// What a virtual file must hold, and whether there can be one.
class Model {
  public:
    std::vector<Segment> segments;
    bool sound = true;

    explicit Model(FuzzedDataProvider& input) {
        for (int n = input.ConsumeIntegralInRange(0, 8); n > 0; --n)
            add(input);
    }

    std::uint64_t size() const { return size_; }

    char at(std::uint64_t offset) const {
        for (const Segment& segment : segments) {
            const std::uint64_t length = length_of(segment);
            if (offset < length) {
                if (const auto* bytes = std::get_if<std::string>(&segment))
                    return (*bytes)[offset];
                if (const auto* range = std::get_if<FileRange>(&segment))
                    return disk_byte(range->offset + offset);
                return '\0';
            }
            offset -= length;
        }
        std::abort();
    }

    void compare(std::uint64_t offset, const std::vector<char>& got, std::size_t n) const {
        for (std::size_t i = 0; i < n; ++i)
            demand(got[i] == at(offset + i), "a byte");
    }

  private:
    std::uint64_t size_ = 0;

    static std::uint64_t length_of(const Segment& segment) {
        if (const auto* bytes = std::get_if<std::string>(&segment))
            return bytes->size();
        const auto* range = std::get_if<FileRange>(&segment);
        return range ? range->length : std::get<Zeros>(segment).length;
    }

    void add(FuzzedDataProvider& input) {
        switch (input.ConsumeIntegralInRange(0, 2)) {
        case 0:
            segments.emplace_back(input.ConsumeRandomLengthString(300));
            break;
        case 1: {
            const int fd = input.ConsumeIntegralInRange(0, 15) == 0 ? -1 : disk();
            const std::uint64_t offset = number(input), length = number(input);
            segments.emplace_back(FileRange{fd, offset, length});
            sound = sound && fd >= 0 && offset <= disk_size && length <= disk_size - offset;
            break;
        }
        default:
            segments.emplace_back(Zeros{number(input)});
        }
        const std::uint64_t length = length_of(segments.back());
        sound = sound && length <= longest - size_;
        size_ = sound ? size_ + length : 0;
    }
};

std::unique_ptr<VirtualFile> open(const Model& model) {
    try {
        auto file = std::make_unique<VirtualFile>(model.segments);
        demand(model.sound, "an unsound file was taken");
        return file;
    } catch (const std::invalid_argument&) {
    } catch (const std::system_error&) {
    }
    demand(!model.sound, "a sound file was refused");
    return nullptr;
}

std::size_t expected(const Model& model, std::uint64_t offset, std::size_t n) {
    return offset >= model.size() ? 0 : std::min<std::uint64_t>(n, model.size() - offset);
}

void read(const Model& model, const VirtualFile& file, FuzzedDataProvider& input, bool cut) {
    const std::uint64_t offset = number(input);
    const auto n = input.ConsumeIntegralInRange<std::size_t>(0, most_read);
    std::vector<char> out(n, '\xff'); // of exactly the size that is asked for
    try {
        const std::size_t got = file.read(offset, out.data(), n);
        demand(got == expected(model, offset, n), "how much was read");
        model.compare(offset, out, got);
    } catch (const std::runtime_error&) {
        demand(cut, "reading failed");
    }
}

void read_next(const Model& model, VirtualFile& file, FuzzedDataProvider& input, bool cut) {
    const auto n = input.ConsumeIntegralInRange<std::size_t>(0, most_read);
    std::vector<char> out(n, '\xff');
    const off_t offset = ::ftello(file.stream());
    const std::size_t got = std::fread(out.data(), 1, n, file.stream());
    if (std::ferror(file.stream())) {
        demand(cut && !file.error().empty(), "the stream failed");
        std::clearerr(file.stream());
    } else if (!cut)
        demand(offset >= 0 && got == expected(model, static_cast<std::uint64_t>(offset), n),
               "how much was streamed");
    if (!cut)
        model.compare(static_cast<std::uint64_t>(offset), out, got);
}

// Where a seek fails, glibc leaves the stream anywhere: it has to be put somewhere before it is used again.
void seek(const Model& model, VirtualFile& file, FuzzedDataProvider& input, bool cut) {
    const auto offset = static_cast<std::int64_t>(number(input));
    const int whence = input.PickValueInArray({SEEK_SET, SEEK_CUR, SEEK_END, 77});
    const auto size = static_cast<std::int64_t>(model.size());
    const std::int64_t base = whence == SEEK_CUR   ? ::ftello(file.stream())
                              : whence == SEEK_END ? size
                                                   : std::int64_t{0};
    const bool inside = whence != 77 && offset >= -base && offset <= size - base;
    const bool sought = ::fseeko(file.stream(), offset, whence) == 0;
    demand(sought == inside || cut, "a seek");
    const std::int64_t now = sought ? base + offset : 0;
    demand(sought || ::fseeko(file.stream(), now, SEEK_SET) == 0 || cut, "the start cannot be sought");
    demand(::ftello(file.stream()) == now || cut, "where a seek ended");
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t n) {
    FuzzedDataProvider input(data, n);
    const Model model(input);
    const auto file = open(model);
    bool cut = false;
    for (int left = 20; file && left > 0 && input.remaining_bytes() > 0; --left) {
        switch (input.ConsumeIntegralInRange(0, 8)) {
        case 0:
            demand(::ftruncate(disk(), input.ConsumeIntegralInRange<off_t>(0, disk_size - 1)) == 0,
                   "cutting");
            cut = true;
            break;
        case 1:
            file->close();
            demand(file->size() == 0 && file->stream() == nullptr, "it is not closed");
            return 0;
        case 2:
        case 3:
        case 4:
            read(model, *file, input, cut);
            break;
        case 5:
        case 6:
            read_next(model, *file, input, cut);
            break;
        default:
            seek(model, *file, input, cut);
        }
    }
    return 0;
}

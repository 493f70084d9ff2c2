// hybrid._native: the Python face of the native code.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <exception>
#include <system_error>

#include "attention_module.hpp"
#include "callbacks.hpp"
#include "virtual_file.hpp"

namespace nb = nanobind;
using hybrid::FileRange;
using hybrid::Interrupt;
using hybrid::Log;
using hybrid::Segment;
using hybrid::VirtualFile;
using hybrid::Zeros;

namespace {

template <typename Pointer> std::uintptr_t address(Pointer pointer) {
    return reinterpret_cast<std::uintptr_t>(pointer);
}

// bytes, (fd, offset, length), or the length of a run of zeros.
Segment to_segment(nb::handle item) {
    if (nb::isinstance<nb::bytes>(item)) {
        const auto bytes = nb::borrow<nb::bytes>(item);
        return std::string(bytes.c_str(), bytes.size());
    }
    if (nb::isinstance<nb::int_>(item))
        return Zeros{nb::cast<std::uint64_t>(item)};
    if (nb::isinstance<nb::tuple>(item) && nb::len(item) == 3)
        return FileRange{nb::cast<int>(item[0]), nb::cast<std::uint64_t>(item[1]),
                         nb::cast<std::uint64_t>(item[2])};
    throw nb::type_error("a segment is bytes, an int or a tuple (fd, offset, length)");
}

std::vector<Segment> to_segments(nb::iterable items) {
    std::vector<Segment> segments;
    for (nb::handle item : items) {
        try {
            segments.push_back(to_segment(item));
        } catch (const nb::cast_error&) {
            throw nb::value_error("a segment's numbers must be non-negative integers of at most 64 bits");
        }
    }
    return segments;
}

// A failed system call becomes an OSError with its errno, not a RuntimeError.
void translate_system_error(const std::exception_ptr& failure, void*) {
    try {
        std::rethrow_exception(failure);
    } catch (const std::system_error& error) {
        const nb::object value = nb::make_tuple(error.code().value(), error.what());
        PyErr_SetObject(PyExc_OSError, value.ptr());
    }
}

// llama_batch as llama.h has it; `hybrid/tail/llama.py` compares it with the bindings'.
struct Batch {
    std::int32_t n_tokens;
    void *token, *embd, *pos, *n_seq_id, *seq_id, *logits;
};

// Calls llama_decode, which is at `function`. What it throws would end the process if ctypes had called it;
// from here it becomes a Python exception.
std::int32_t decode(std::uintptr_t function, std::uintptr_t context, std::uintptr_t batch) {
    const auto call = reinterpret_cast<std::int32_t (*)(void*, Batch)>(function);
    const nb::gil_scoped_release release;
    return call(reinterpret_cast<void*>(context), *reinterpret_cast<const Batch*>(batch));
}

nb::bytes read_bytes(const VirtualFile& file, std::uint64_t offset, std::uint64_t n) {
    const std::uint64_t left = offset < file.size() ? file.size() - offset : 0;
    std::string out(static_cast<std::size_t>(std::min(n, left)), '\0');
    const std::size_t got = file.read(offset, out.data(), out.size());
    return nb::bytes(out.data(), got);
}

} // namespace

NB_MODULE(_native, m) {
    m.doc() = "Native parts of hybrid: the virtual file llama.cpp loads from, the callbacks it may call, "
              "and attention on the CPU.";

    nb::register_exception_translator(translate_system_error);

    nb::class_<VirtualFile>(m, "VirtualFile")
        .def(
            "__init__",
            [](VirtualFile* self, nb::iterable segments) { new (self) VirtualFile(to_segments(segments)); },
            nb::arg("segments"))
        .def_prop_ro("pointer", [](const VirtualFile& self) { return address(self.stream()); })
        .def_prop_ro("size", &VirtualFile::size)
        .def_prop_ro("error", &VirtualFile::error)
        .def("read", &read_bytes, nb::arg("offset"), nb::arg("n"))
        .def("close", &VirtualFile::close);

    nb::class_<Interrupt>(m, "Interrupt")
        .def(nb::init<>())
        .def("set", &Interrupt::set, nb::arg("stop") = true)
        .def_prop_ro("is_set", &Interrupt::is_set)
        .def_prop_ro("progress", &Interrupt::progress)
        .def_prop_ro("pointer", [](const Interrupt& self) { return address(&self); })
        .def_prop_ro_static("on_abort", [](nb::handle) { return address(&Interrupt::on_abort); })
        .def_prop_ro_static("on_progress", [](nb::handle) { return address(&Interrupt::on_progress); });

    m.def("log_callback", [] { return address(&Log::on_line); });
    m.def("log_count", [] { return Log::instance().count(); });
    m.def(
        "log_since",
        [](std::uint64_t mark) {
            nb::list lines;
            for (const auto& [level, thread, text] : Log::instance().since(mark))
                lines.append(nb::make_tuple(level, thread, nb::bytes(text.data(), text.size())));
            return lines;
        },
        nb::arg("mark"));

    m.def("decode", &decode, nb::arg("function"), nb::arg("context"), nb::arg("batch"));

    hybrid::bind_attention(m);
}

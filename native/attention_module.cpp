// The Python face of the attention kernel and of the read probe. Tensors come as addresses: hybrid.head.kv
// checks them before, and what numbers alone can tell is checked again.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <stdexcept>

#include "attention.hpp"
#include "attention_module.hpp"
#include "bandwidth.hpp"

namespace nb = nanobind;

namespace hybrid {

namespace {

template <typename T> T* pointer(std::uintptr_t address) {
    if (address % alignof(T))
        throw nb::value_error("q, the output or the sinks are not aligned to their values");
    return reinterpret_cast<T*>(address);
}

RowType row_type(std::int64_t number) {
    if (number < 0 || number > static_cast<std::int64_t>(RowType::q8_0))
        throw nb::value_error("a cache of unknown type");
    return static_cast<RowType>(number);
}

// (start, n, position, n_slots, first, end, then address, slot stride, head stride and type of K and of V)
AttentionRun to_run(nb::handle item, int dim_k, int dim_v) {
    if (!nb::isinstance<nb::tuple>(item) || nb::len(item) != 14)
        throw nb::type_error("a run is a tuple of 14 numbers");
    std::array<std::int64_t, 14> x;
    try {
        for (std::size_t i = 0; i < x.size(); ++i)
            x[i] = nb::cast<std::int64_t>(item[i]);
    } catch (const nb::cast_error&) {
        throw nb::value_error("a run's numbers must be integers of at most 64 bits");
    }
    const Rows k{reinterpret_cast<const char*>(x[6]), x[7], x[8], row_type(x[9]), dim_k};
    const Rows v{reinterpret_cast<const char*>(x[10]), x[11], x[12], row_type(x[13]), dim_v};
    return {x[0], x[1], x[2], k, v, x[3], x[4], x[5]};
}

void attend_addresses(std::uintptr_t q, std::uintptr_t out, std::uintptr_t lse, std::int64_t n, int n_heads,
                      int n_kv_heads, int dim_k, int dim_v, nb::iterable runs, float scale,
                      std::int64_t window, float softcap, std::uintptr_t sinks, int n_threads,
                      const std::string& instruction_set) {
    Attention work;
    work.q = pointer<const float>(q);
    work.out = pointer<float>(out);
    work.lse = pointer<float>(lse);
    work.n = n;
    work.n_heads = n_heads;
    work.n_kv_heads = n_kv_heads;
    work.dim_k = dim_k;
    work.dim_v = dim_v;
    work.scale = scale;
    work.window = window;
    work.softcap = softcap;
    work.sinks = pointer<const float>(sinks);
    for (nb::handle item : runs)
        work.runs.push_back(to_run(item, dim_k, dim_v));
    const nb::gil_scoped_release released;
    attend(work, n_threads, instruction_set);
}

// A signal's handler runs amid the measurement, and what it raises ends it.
double measured_bandwidth(std::int64_t n_bytes, int n_threads, double seconds) {
    return read_bandwidth(n_bytes, n_threads, seconds, [] {
        const nb::gil_scoped_acquire acquired;
        if (PyErr_CheckSignals() != 0)
            throw nb::python_error();
    });
}

} // namespace

void bind_attention(nb::module_& m) {
    m.def("attend", &attend_addresses, nb::arg("q"), nb::arg("out"), nb::arg("lse"), nb::arg("n"),
          nb::arg("n_heads"), nb::arg("n_kv_heads"), nb::arg("dim_k"), nb::arg("dim_v"), nb::arg("runs"),
          nb::arg("scale"), nb::arg("window"), nb::arg("softcap"), nb::arg("sinks"), nb::arg("n_threads"),
          nb::arg("instruction_set"));
    m.def("instruction_sets", &instruction_sets);
    m.def("read_bandwidth", &measured_bandwidth, nb::arg("n_bytes"), nb::arg("n_threads"), nb::arg("seconds"),
          nb::call_guard<nb::gil_scoped_release>());
}

} // namespace hybrid

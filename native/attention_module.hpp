#pragma once

#include <nanobind/nanobind.h>

namespace hybrid {

// Adds attend, instruction_sets and read_bandwidth to the module.
void bind_attention(nanobind::module_& m);

} // namespace hybrid

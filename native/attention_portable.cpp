// The attention kernel for any processor: four floats at a time, which compilers turn into what vectors there
// are.
#define LANES 4
#include "attention_task.hpp"

#include "attention_lanes.hpp"

#include "attention_kernel.hpp"

namespace hybrid {

Kernel scalar_kernel(const Rows& k, const Rows& v);

Kernel portable_kernel(const Rows& k, const Rows& v) {
    const Kernel kernel = find_kernel(k, v);
    return kernel ? kernel : scalar_kernel(k, v);
}

} // namespace hybrid

// The attention kernel for head dimensions that are no multiple of four.
#define LANES 1
#include "attention_task.hpp"

#include "attention_lanes.hpp"

#include "attention_kernel.hpp"

namespace hybrid {

Kernel scalar_kernel(const Rows& k, const Rows& v);

Kernel scalar_kernel(const Rows& k, const Rows& v) {
    return find_kernel(k, v);
}

} // namespace hybrid

// The kernel in the instructions that every machine of an architecture has.
#define CHECKNRUN_LANES 4
#define CHECKNRUN_NAMESPACE plain
#include "rows_kernel.h"

namespace checknrun {
const Kernels plain_kernels = plain::kernels;
}

// The kernel for the instructions that every machine of the architecture has.
#define CHECKNRUN_LANES 4
#define CHECKNRUN_NAMESPACE plain
#include "rows_kernel.h"

namespace checknrun {
const Kernels plain_kernels = plain::kernels;
}

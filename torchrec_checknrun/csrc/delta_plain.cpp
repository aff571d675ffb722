// The delta kernel for the instructions that every machine of the architecture has.
#define CHECKNRUN_LANES 4
#define CHECKNRUN_NAMESPACE plain
#include "delta_kernel.h"

namespace checknrun {
const DeltaKernels plain_delta_kernels = plain::delta_kernels;
}

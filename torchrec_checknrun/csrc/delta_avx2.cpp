// The delta kernel for x86 with AVX2.
#include "delta.h"
#ifdef CHECKNRUN_X86
#include "rows_headers.h"
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#define CHECKNRUN_LANES 8
#define CHECKNRUN_NAMESPACE avx2
#define CHECKNRUN_F16C 1
#include "delta_kernel.h"
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace checknrun {
const DeltaKernels avx2_delta_kernels = avx2::delta_kernels;
}
#endif

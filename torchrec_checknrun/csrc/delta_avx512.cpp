// The delta kernel for x86 with AVX-512.
#include "delta.h"
#ifdef CHECKNRUN_X86
#include "rows_headers.h"
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,bmi2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,bmi2,prefer-vector-width=512")
#endif
#define CHECKNRUN_LANES 16
#define CHECKNRUN_NAMESPACE avx512
#define CHECKNRUN_F16C 1
#define CHECKNRUN_PEXT 1
#include "delta_kernel.h"
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace checknrun {
const DeltaKernels avx512_delta_kernels = avx512::delta_kernels;
}
#endif

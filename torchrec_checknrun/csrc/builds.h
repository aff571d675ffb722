// A kernel's builds, one for each instruction set, and which of them run here.
#pragma once

#include <c10/util/Exception.h>

#include <string>
#include <vector>

#include "rows.h"

namespace checknrun {

template <typename Kernels>
struct Build {
  const char* name;
  const Kernels* kernels;
};

inline bool runs_here(const std::string& build) {
#ifdef CHECKNRUN_X86
  if (build == "avx512") {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("bmi2");
  }
  if (build == "avx2") return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return build == "plain";
}

// Returns those of the builds that run here.
template <typename Kernels>
std::vector<Build<Kernels>> usable(std::vector<Build<Kernels>> builds) {
  std::erase_if(builds, [](const Build<Kernels>& each) { return !runs_here(each.name); });
  return builds;
}

// Returns the first of the usable builds, or the one that is asked for.
template <typename Kernels>
const Kernels& kernels_of(const std::vector<Build<Kernels>>& builds, const std::string& wanted) {
  for (const Build<Kernels>& each : builds) {
    if (wanted.empty() || wanted == each.name) return *each.kernels;
  }
  TORCH_CHECK_VALUE(false, "no build '", wanted, "' of the kernel that runs on this machine");
}

}  // namespace checknrun

// What operations on row-wise quantized rows share.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "rows.h"

namespace checknrun {

// Returns a build of the kernel, by default the best for this machine.
const Kernels& row_kernels(const std::string& build);

Value value_of(const at::Tensor& tensor);

// Returns the bytes of a stored row.
int64_t row_bytes_of(int64_t dim, int64_t bits);

}  // namespace checknrun

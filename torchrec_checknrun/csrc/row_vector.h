// The rows that an operation works on, as the caller gives them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace checknrun {

// Returns the vector's values, all checked to be in [0, rows) before anything is read or written
// there; null without a vector.
inline const int64_t* row_vector(const std::optional<at::Tensor>& given, int64_t rows) {
  if (!given) return nullptr;
  const at::Tensor& vector = *given;
  TORCH_CHECK_VALUE(vector.dim() == 1 && vector.is_contiguous() &&
                        vector.scalar_type() == at::kLong && vector.device().is_cpu(),
                    "expected a contiguous int64 vector on the CPU, not ", vector.scalar_type(),
                    " ", vector.sizes());
  const int64_t* at = vector.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < vector.numel(); ++i) {
    TORCH_CHECK_INDEX(at[i] >= 0 && at[i] < rows, "row ", at[i], " of ", rows);
  }
  return at;
}

// Returns the memory of a vector of bytes; null where it is empty.
inline uint8_t* bytes_of(const at::Tensor& tensor, const char* what) {
  TORCH_CHECK_VALUE(tensor.dim() == 1 && tensor.is_contiguous() &&
                        tensor.scalar_type() == at::kByte && tensor.device().is_cpu(),
                    what, " must be contiguous uint8 on the CPU");
  return tensor.numel() ? tensor.mutable_data_ptr<uint8_t>() : nullptr;
}

}  // namespace checknrun

// Which rows an operation works on, as it is given them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace checknrun {

// What the vector holds, all of it in [0, rows), or null if there is none: checked before anything
// is read or written there.
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

}  // namespace checknrun

// torch.ops.checknrun.copy_checked and check_of: records in memory that outlives the process.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "checked_copy.h"
#include "row_vector.h"

namespace checknrun {
namespace {

// Copies pieces to the beginning of ``into``, one after the other; returns their check.
int64_t copy_checked(const std::vector<at::Tensor>& pieces, const at::Tensor& into, int64_t seed) {
  int64_t left = into.numel();
  CheckedCopy copy(bytes_of(into, "into"), BlockCheck(uint64_t(seed)));
  for (const at::Tensor& piece : pieces) {
    const uint8_t* from = bytes_of(piece, "a piece");
    left -= piece.numel();
    TORCH_CHECK_VALUE(left >= 0, "more than ", into.numel(), " bytes");
    copy.add(from, piece.numel());
  }
  return copy.sum();
}

// Returns the check of bytes that ``copy_checked`` has copied.
int64_t check_of(const at::Tensor& content, int64_t seed) {
  const uint8_t* bytes = bytes_of(content, "content");
  BlockCheck check{uint64_t(seed)};
  check.add(bytes, content.numel());
  return check.sum();
}

}  // namespace
}  // namespace checknrun

TORCH_LIBRARY_FRAGMENT(checknrun, library) {
  library.def("copy_checked(Tensor[] pieces, Tensor(a!) into, int seed) -> int",
              checknrun::copy_checked);
  library.def("check_of(Tensor content, int seed) -> int", checknrun::check_of);
}

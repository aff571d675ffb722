// torch.ops.checknrun.write_record and record_check: content in memory that outlives the process.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "checked_copy.h"
#include "row_vector.h"
#include "undo_journal.h"

namespace checknrun {
namespace {

// Writes number, size and check of a content into the first words of a memory, and its pieces, one
// after the other, behind the head. While that goes on the number is -1.
void write_record(const at::Tensor& memory, int64_t head, const std::vector<at::Tensor>& pieces,
                  int64_t number) {
  uint8_t* const bytes = bytes_of(memory, "memory");
  TORCH_CHECK_VALUE(head >= 24 && head <= memory.numel() && uintptr_t(bytes) % 8 == 0,
                    "no room for three words before the content");
  int64_t* const words = reinterpret_cast<int64_t*>(bytes);
  publish_word(words, -1);
  int64_t size = 0;
  for (const at::Tensor& piece : pieces) size += (bytes_of(piece, "a piece"), piece.numel());
  TORCH_CHECK_VALUE(size <= memory.numel() - head, size, " bytes for a place of ",
                    memory.numel() - head);
  CheckedCopy copy(bytes + head, uint64_t(number));
  for (const at::Tensor& piece : pieces) {
    if (piece.numel()) copy.add(piece.const_data_ptr<uint8_t>(), piece.numel());
  }
  words[1] = size;
  words[2] = copy.end();
  publish_word(words, number);
}

// Returns the check of a content.
int64_t record_check(const at::Tensor& content, int64_t number) {
  BlockCheck check{uint64_t(number)};
  check.add(bytes_of(content, "content"), content.numel());
  return check.sum();
}

}  // namespace
}  // namespace checknrun

TORCH_LIBRARY_FRAGMENT(checknrun, library) {
  library.def("write_record(Tensor(a!) memory, int head, Tensor[] pieces, int number) -> ()",
              checknrun::write_record);
  library.def("record_check(Tensor content, int number) -> int", checknrun::record_check);
}

// torch.ops.checknrun: copy rows' bytes from chosen places to chosen places, in one pass.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "row_vector.h"

namespace checknrun {
namespace {

// Returns the bytes of a row, of a contiguous tensor with ``rows`` rows.
int64_t row_bytes(const at::Tensor& tensor, int64_t rows, const char* what) {
  TORCH_CHECK_VALUE(tensor.is_contiguous() && tensor.device().is_cpu() && rows > 0 &&
                        int64_t(tensor.nbytes()) % rows == 0,
                    what, " must be ", rows, " rows in one piece on the CPU, not ",
                    tensor.scalar_type(), " ", tensor.sizes());
  return int64_t(tensor.nbytes()) / rows;
}

// Returns the places of n rows, or null: one after another from ``first`` on.
const int64_t* check_places(const std::optional<at::Tensor>& places, int64_t first, int64_t n,
                            int64_t rows) {
  if (!places) {
    TORCH_CHECK_INDEX(first >= 0 && n >= 0 && first <= rows - n, "rows ", first, " to ", first + n,
                      " of ", rows);
    return nullptr;
  }
  TORCH_CHECK_VALUE(places->numel() == n, places->numel(), " places for ", n, " rows");
  return row_vector(*places, rows);
}

struct Places {
  const uint8_t* source;
  const int64_t* from;
  uint8_t* target;
  const int64_t* to;
  int64_t size;
};

// A size known to the compiler makes a row one instruction.
template <int64_t known>
void copy(const Places& all, int64_t begin, int64_t end) {
  const int64_t size = known ? known : all.size;
  for (int64_t r = begin; r < end; ++r) {
    std::memcpy(all.target + (all.to ? all.to[r] : r) * size,
                all.source + (all.from ? all.from[r] : r) * size, size_t(size));
  }
}

void copy_part(const Places& all, int64_t begin, int64_t end) {
  if (!all.from && !all.to) {
    std::memcpy(all.target + begin * all.size, all.source + begin * all.size,
                size_t((end - begin) * all.size));
  } else if (all.size == 4) {
    copy<4>(all, begin, end);
  } else {
    copy<0>(all, begin, end);
  }
}

// Fewer rows do not pay for another thread.
int64_t rows_a_thread(int64_t size) {
  return std::max<int64_t>(16, 32768 / std::max<int64_t>(size, 1));
}

// Copies ``n`` rows of source (``from``, or all from ``first`` on) to as many rows of target
// (``to``, or all from ``into`` on).
void copy_rows(const at::Tensor& source, int64_t rows, int64_t first,
               const std::optional<at::Tensor>& from, at::Tensor target, int64_t into,
               const std::optional<at::Tensor>& to, int64_t n) {
  TORCH_CHECK_VALUE(target.dim() > 0, "target has no rows");
  const int64_t size = row_bytes(source, rows, "source");
  TORCH_CHECK_VALUE(row_bytes(target, target.size(0), "target") == size, "rows of ", size,
                    " bytes to others of ", target.sizes());
  const int64_t* sources = check_places(from, first, n, rows);
  const int64_t* targets = check_places(to, into, n, target.size(0));
  const auto* stored = static_cast<const uint8_t*>(source.const_data_ptr());
  auto* live = static_cast<uint8_t*>(target.mutable_data_ptr());
  const Places all{stored + (sources ? 0 : first * size), sources,
                   live + (targets ? 0 : into * size), targets, size};
  at::parallel_for(0, n, rows_a_thread(size), [&](int64_t begin, int64_t end) {
    copy_part(all, begin, end);
  });
}

// Copies rows of several tensors: ``positions`` + row_start go to memory at the first offset, the
// rows of each tensor to the tensor's own offset. Sorted positions without gaps are copied as one
// piece.
void stage_rows(const at::Tensor& positions, int64_t row_start, at::TensorList tensors,
                at::Tensor memory, at::IntArrayRef offsets) {
  const int64_t n = positions.numel(), room = row_bytes(memory, 1, "memory");
  TORCH_CHECK_VALUE(offsets.size() == tensors.size() + 1, "expected an offset for ids and each of ",
                    tensors.size(), " tensors, not ", offsets.size());
  auto* bytes = static_cast<uint8_t*>(memory.mutable_data_ptr());
  const auto place = [&](int64_t offset, int64_t size) {
    TORCH_CHECK_INDEX(offset >= 0 && size <= room - offset, size, " bytes at ", offset, " of ",
                      room);
    return bytes + offset;
  };
  uint8_t* ids = place(offsets[0], n * int64_t(sizeof(int64_t)));
  int64_t least = INT64_MAX, total = sizeof(int64_t);
  std::vector<Places> parts;
  for (size_t i = 0; i < tensors.size(); ++i) {
    TORCH_CHECK_VALUE(tensors[i].dim() > 0, "a tensor has no rows");
    const int64_t rows = tensors[i].size(0), size = row_bytes(tensors[i], rows, "a tensor");
    parts.push_back({static_cast<const uint8_t*>(tensors[i].const_data_ptr()), nullptr,
                     place(offsets[i + 1], n * size), nullptr, size});
    least = std::min(least, rows);
    total += size;
  }
  const int64_t* from = row_vector(positions, least);
  const bool whole = n > 0 && from[n - 1] - from[0] == n - 1;
  for (Places& part : parts) {
    part.from = whole ? nullptr : from;
    if (whole) part.source += from[0] * part.size;
  }
  at::parallel_for(0, n, rows_a_thread(total), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t id = from[r] + row_start;
      std::memcpy(ids + r * int64_t(sizeof(id)), &id, sizeof(id));
    }
    for (const Places& part : parts) copy_part(part, begin, end);
  });
}

}  // namespace
}  // namespace checknrun

TORCH_LIBRARY_FRAGMENT(checknrun, library) {
  library.def(
      "copy_rows(Tensor source, int rows, int first, Tensor? from_, Tensor(a!) target, int into, "
      "Tensor? to, int n) -> ()",
      checknrun::copy_rows);
  library.def(
      "stage_rows(Tensor positions, int row_start, Tensor[] tensors, Tensor(a!) memory, "
      "int[] offsets) -> ()",
      checknrun::stage_rows);
}

// torch.ops.checknrun: rows' bytes from chosen places to chosen places, in one pass over them.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

namespace checknrun {
namespace {

// Bytes of a row of a tensor that is ``rows`` rows in one piece.
int64_t row_bytes(const at::Tensor& tensor, int64_t rows, const char* what) {
  TORCH_CHECK_VALUE(tensor.is_contiguous() && tensor.device().is_cpu() && rows > 0 &&
                        int64_t(tensor.nbytes()) % rows == 0,
                    what, " must be ", rows, " rows in one piece on the CPU, not ",
                    tensor.scalar_type(), " ", tensor.sizes());
  return int64_t(tensor.nbytes()) / rows;
}

// Where n rows are, or null: one after the other from ``first`` on.
const int64_t* check_places(const std::optional<at::Tensor>& places, int64_t first, int64_t n,
                            int64_t rows) {
  if (!places) {
    TORCH_CHECK_INDEX(first >= 0 && n >= 0 && first <= rows - n, "rows ", first, " to ", first + n,
                      " of ", rows);
    return nullptr;
  }
  TORCH_CHECK_VALUE(places->dim() == 1 && places->numel() == n && places->is_contiguous() &&
                        places->scalar_type() == at::kLong && places->device().is_cpu(),
                    "expected a contiguous int64 vector of ", n, " rows on the CPU");
  const int64_t* at = places->const_data_ptr<int64_t>();
  for (int64_t i = 0; i < n; ++i) {
    TORCH_CHECK_INDEX(at[i] >= 0 && at[i] < rows, "row ", at[i], " of ", rows);
  }
  return at;
}

struct Places {
  const uint8_t* source;
  const int64_t* from;
  uint8_t* target;
  const int64_t* to;
  int64_t size;
};

// With a size that the compiler knows, a row is one instruction.
template <int64_t known>
void copy(const Places& all, int64_t begin, int64_t end) {
  const int64_t size = known ? known : all.size;
  for (int64_t r = begin; r < end; ++r) {
    std::memcpy(all.target + (all.to ? all.to[r] : r) * size,
                all.source + (all.from ? all.from[r] : r) * size, size_t(size));
  }
}

// ``n`` rows of source, ``from`` or all from ``first`` on, to as many of target, ``to`` or from
// ``into`` on.
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
  const int64_t grain = std::max<int64_t>(16, 32768 / std::max<int64_t>(size, 1));
  at::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) {
    if (!all.from && !all.to) {
      std::memcpy(all.target + begin * size, all.source + begin * size,
                  size_t((end - begin) * size));
    } else if (size == 4) {
      copy<4>(all, begin, end);
    } else {
      copy<0>(all, begin, end);
    }
  });
}

}  // namespace
}  // namespace checknrun

TORCH_LIBRARY_FRAGMENT(checknrun, library) {
  library.def(
      "copy_rows(Tensor source, int rows, int first, Tensor? from_, Tensor(a!) target, int into, "
      "Tensor? to, int n) -> ()",
      checknrun::copy_rows);
}

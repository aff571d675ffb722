// torch.ops.checknrun.serve_rows: lay rows out as inference tables hold them, a few at a time, so that
// what lies between reading and writing a row stays in the nearest cache.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "row_ops.h"
#include "row_vector.h"

namespace checknrun {
namespace {

constexpr int64_t kScaleBytes = 4;     // scale and bias, in fp16
constexpr int64_t kBlockValues = 4096;  // decoded at a time

struct Served {
  uint8_t* rows;
  int64_t stride;
  int64_t codes;  // bytes
  bool scale_first;
};

void lay_out(const Served& served, int64_t row, const uint8_t* fused) {
  uint8_t* out = served.rows + row * served.stride;
  const int64_t width = served.codes + kScaleBytes;
  if (served.scale_first) {
    std::memcpy(out, fused + served.codes, kScaleBytes);
    std::memcpy(out + kScaleBytes, fused, size_t(served.codes));
  } else {
    std::memcpy(out, fused, size_t(width));
  }
  std::memset(out + width, 0, size_t(served.stride - width));
}

// Lays out rows of ``source``: stored by encode_rows with ``bits`` bits and ``dim`` values, or, where
// ``bits`` is 32, values themselves; ``positions`` says which. Rows that fp16's range or precision
// doesn't suit are refused, and zero.
int64_t serve_rows(const at::Tensor& source, int64_t bits, double factor, int64_t dim,
                   const std::optional<at::Tensor>& positions, int64_t to_bits, bool scale_first,
                   at::Tensor out, at::Tensor refused, c10::string_view build) {
  TORCH_CHECK_VALUE(dim > 0, "rows have no columns");
  const bool stored = bits != 32;
  const int64_t row_bytes = stored ? row_bytes_of(dim, bits) : 0;
  const Value value = stored ? Value::fp32 : value_of(source);
  TORCH_CHECK_VALUE(source.dim() == 2 && source.is_contiguous() && source.device().is_cpu() &&
                        source.size(1) == (stored ? row_bytes : dim) &&
                        (!stored || source.scalar_type() == at::kByte),
                    "expected contiguous rows on the CPU, not ", source.scalar_type(), " ",
                    source.sizes());
  TORCH_CHECK_VALUE(to_bits == 2 || to_bits == 4 || to_bits == 8,
                    "served rows have 2, 4 or 8 bits, not ", to_bits);
  const int64_t n = positions ? positions->numel() : source.size(0);
  const int64_t codes = code_bytes(dim, int(to_bits)), width = codes + kScaleBytes;
  TORCH_CHECK_VALUE(out.dim() == 2 && out.size(0) == n && out.size(1) >= width &&
                        out.is_contiguous() && out.scalar_type() == at::kByte &&
                        out.device().is_cpu(),
                    "expected contiguous uint8 of (", n, ", ", width, " or more), not ",
                    out.scalar_type(), " ", out.sizes());
  uint8_t* const refusals = bytes_of(refused, "refused");
  TORCH_CHECK_VALUE(refused.numel() == n, "refused must be ", n, " bytes");
  const int64_t* at = row_vector(positions, source.size(0));
  const Served served{n ? out.mutable_data_ptr<uint8_t>() : nullptr, out.size(1), codes,
                      scale_first};
  const Kernels& kernels = row_kernels(std::string(build));
  const auto* data = static_cast<const uint8_t*>(source.const_data_ptr());
  const int64_t value_row = dim * int64_t(source.element_size());
  const int64_t block = std::max<int64_t>(16, kBlockValues / dim);
  std::atomic<int64_t> count{0};
  at::parallel_for(0, n, 4 * block, [&](int64_t begin, int64_t end) {
    std::vector<float> values(size_t(stored ? block * dim : 0));
    std::vector<uint8_t> fused(size_t(block * width));
    for (int64_t start = begin; start < end; start += block) {
      const int64_t rows = std::min(block, end - start);
      const int64_t* chosen = at ? at + start : nullptr;
      const uint8_t* first = data + (at ? 0 : start * (stored ? row_bytes : value_row));
      if (stored) {
        kernels.decode({first, chosen, row_bytes, dim, int(bits), float(factor), nullptr,
                        values.data(), Value::fp32, dim},
                       0, rows);
      }
      const void* from = stored ? static_cast<const void*>(values.data()) : first;
      count += kernels.encode({from, value, stored ? nullptr : chosen, dim, dim, int(to_bits),
                               Method::asymmetric, 1, 0.f, 1.f, true, fused.data(), width,
                               refusals + start},
                              0, rows);
      for (int64_t r = 0; r < rows; ++r) lay_out(served, start + r, fused.data() + r * width);
    }
  });
  return count;
}

}  // namespace
}  // namespace checknrun

TORCH_LIBRARY_FRAGMENT(checknrun, library) {
  library.def(
      "serve_rows(Tensor source, int bits, float factor, int dim, Tensor? positions, int to_bits, "
      "bool scale_first, Tensor(a!) out, Tensor(b!) refused, str build) -> int",
      checknrun::serve_rows);
}

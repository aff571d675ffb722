// torch.ops.checknrun: rows on their own grids to differences and back, on ATen's threads.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <tuple>
#include <vector>

#include "builds.h"
#include "delta_host.h"
#include "row_vector.h"

namespace checknrun {

void grow(Stream& stream, int64_t more) {
  const int64_t room = std::max<int64_t>(4096, std::max(2 * stream.room, stream.size + more));
  void* data = std::realloc(stream.data, size_t(room));
  if (!data) throw std::bad_alloc();
  stream.data = static_cast<uint8_t*>(data);
  stream.room = room;
}

const DeltaKernels& delta_kernels_of(const std::string& build) {
  static const std::vector<Build<DeltaKernels>> all = usable<DeltaKernels>({
#ifdef CHECKNRUN_X86
      {"avx512", &avx512_delta_kernels},
      {"avx2", &avx2_delta_kernels},
#endif
      {"plain", &plain_delta_kernels},
  });
  return kernels_of(all, build);
}

namespace {

using MaybeTensor = std::optional<at::Tensor>;

GridRows grid_of(const at::Tensor& kind, const at::Tensor& exponent, const at::Tensor& codes,
                 int64_t rows, int64_t dim) {
  return {memory_of<uint8_t>(kind, {rows}, "kind"),
          memory_of<int16_t>(exponent, {rows}, "exponent"),
          memory_of<int32_t>(codes, {rows, dim}, "codes")};
}

GridRows grid_of(const MaybeTensor& kind, const MaybeTensor& exponent, const MaybeTensor& codes,
                 int64_t rows, int64_t dim) {
  if (!kind && !exponent && !codes) return {};
  TORCH_CHECK_VALUE(kind && exponent && codes, "a predecessor has kind, exponent and codes");
  GridRows grid = grid_of(*kind, *exponent, *codes, rows, dim);
  if (rows == 0) grid.kind = nullptr;
  return grid;
}

void check_dim(int64_t dim) { TORCH_CHECK_VALUE(dim > 0 && dim < (1 << 24), "dim is ", dim); }

Sizes delta_sizes(const at::Tensor& symbols, int64_t dim) {
  check_dim(dim);
  return sizes_of(bytes_of(symbols, "symbols"), symbols.numel(), dim);
}

std::tuple<at::Tensor, Sizes> delta_encode(
    const MaybeTensor& weight, const MaybeTensor& wanted, const MaybeTensor& before_kind,
    const MaybeTensor& before_exponent, const MaybeTensor& before_codes, at::Tensor kind,
    at::Tensor exponent, at::Tensor codes, c10::string_view build) {
  TORCH_CHECK_VALUE(codes.dim() == 2, "codes must have two dimensions");
  const int64_t n = codes.size(0), dim = codes.size(1);
  check_dim(dim);
  TORCH_CHECK_VALUE(weight.has_value() == wanted.has_value(), "weights have wanted exponents");
  if (weight) {
    TORCH_CHECK_VALUE(weight->dim() == 2 && weight->size(0) == n && weight->size(1) == dim &&
                          weight->device().is_cpu() &&
                          (n == 0 || dim == 1 || weight->stride(1) == 1),
                      "expected ", n, " rows of ", dim, " columns on the CPU, each in one piece, ",
                      "not ", weight->sizes(), " with strides ", weight->strides());
  }
  at::Tensor symbols = at::empty({n}, kind.options().dtype(at::kByte));
  const DeltaEncodeJob job{weight ? weight->const_data_ptr() : nullptr,
                           weight ? value_of(*weight) : Value::fp32,
                           weight ? weight->stride(0) : 0,
                           dim,
                           wanted ? memory_of<int16_t>(*wanted, {n}, "wanted") : nullptr,
                           grid_of(before_kind, before_exponent, before_codes, n, dim),
                           grid_of(kind, exponent, codes, n, dim),
                           symbols.mutable_data_ptr<uint8_t>()};
  const DeltaKernels& kernels = delta_kernels_of(std::string(build));
  const int64_t parts = parts_of(n, dim);
  std::vector<OwnedStreams> streams(static_cast<size_t>(parts));
  check(in_parts(n, parts, [&](int64_t part, int64_t begin, int64_t end) {
    return kernels.encode(job, begin, end, streams[size_t(part)]);
  }));
  const Sizes sizes = sizes_of(job.symbols, n, dim);
  return {join(symbols, streams, sizes), sizes};
}

const int64_t* chosen_rows(const MaybeTensor& chosen, int64_t rows) {
  const int64_t* at = row_vector(chosen, rows);
  for (int64_t i = 1; chosen && i < chosen->numel(); ++i) {
    TORCH_CHECK_VALUE(at[i - 1] < at[i], "chosen rows must be sorted and distinct");
  }
  return at;
}

void delta_apply(const at::Tensor& data, int64_t rows, int64_t dim, const MaybeTensor& chosen,
                 int64_t first, const MaybeTensor& before_kind, const MaybeTensor& before_exponent,
                 const MaybeTensor& before_codes, at::Tensor kind, at::Tensor exponent,
                 at::Tensor codes, c10::string_view build) {
  check_dim(dim);
  const uint8_t* stream = bytes_of(data, "data");
  TORCH_CHECK_VALUE(0 <= rows && rows <= data.numel(), "data don't hold ", rows, " symbols");
  const Sizes sizes = sizes_of(stream, rows, dim);
  int64_t total = kSlack;
  for (const int64_t size : sizes) total += size;
  TORCH_CHECK_VALUE(data.numel() == total, "expected ", total, " bytes with slack, not ",
                    data.numel());
  TORCH_CHECK_VALUE(codes.dim() == 2, "codes must have two dimensions");
  const int64_t n = chosen ? chosen->numel() : rows, cols = codes.size(1);
  TORCH_CHECK_VALUE(0 <= first && first <= dim && cols <= dim - first, "columns ", first, " to ",
                    first + cols, " of ", dim);
  DeltaApplyJob job{stream, stream + rows, {}, dim, chosen_rows(chosen, rows), first, cols,
                    grid_of(before_kind, before_exponent, before_codes, n, cols),
                    grid_of(kind, exponent, codes, n, cols)};
  const uint8_t* at = job.extra + sizes[1];
  size_t next = 2;
  for (int c = 1; c < kClasses; ++c) {
    for (int p = 0; p < kPlanes.count[c]; ++p) {
      job.planes[c][p] = at;
      at += sizes[next++];
    }
  }
  const DeltaKernels& kernels = delta_kernels_of(std::string(build));
  check(in_parts(n, parts_of(n, dim), [&](int64_t, int64_t begin, int64_t end) {
    return kernels.apply(job, begin, end);
  }));
}

void delta_values(const at::Tensor& kind, const at::Tensor& exponent, const at::Tensor& codes,
                  at::Tensor out, c10::string_view build) {
  TORCH_CHECK_VALUE(codes.dim() == 2, "codes must have two dimensions");
  const int64_t n = codes.size(0), dim = codes.size(1);
  const GridRows rows = grid_of(kind, exponent, codes, n, dim);
  float* to = memory_of<float>(out, {n, dim}, "out");
  const DeltaKernels& kernels = delta_kernels_of(std::string(build));
  in_parts(n, parts_of(n, dim), [&](int64_t, int64_t begin, int64_t end) {
    kernels.values(rows, dim, to, begin, end);
    return kSound;
  });
}

}  // namespace
}  // namespace checknrun

TORCH_LIBRARY_FRAGMENT(checknrun, library) {
  library.def(
      "delta_encode(Tensor? weight, Tensor? wanted, Tensor? before_kind, Tensor? before_exponent, "
      "Tensor? before_codes, Tensor(a!) kind, Tensor(b!) exponent, Tensor(c!) codes, str build) "
      "-> (Tensor, int[])",
      checknrun::delta_encode);
  library.def("delta_sizes(Tensor symbols, int dim) -> int[]", checknrun::delta_sizes);
  library.def(
      "delta_apply(Tensor data, int rows, int dim, Tensor? chosen, int first, "
      "Tensor? before_kind, Tensor? before_exponent, Tensor? before_codes, Tensor(a!) kind, "
      "Tensor(b!) exponent, Tensor(c!) codes, str build) -> ()",
      checknrun::delta_apply);
  library.def(
      "delta_values(Tensor kind, Tensor exponent, Tensor codes, Tensor(a!) out, str build) -> ()",
      checknrun::delta_values);
}

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
#include "delta.h"
#include "row_vector.h"

namespace checknrun {

void grow(Stream& stream, int64_t more) {
  const int64_t room = std::max<int64_t>(4096, std::max(2 * stream.room, stream.size + more));
  void* data = std::realloc(stream.data, size_t(room));
  if (!data) throw std::bad_alloc();
  stream.data = static_cast<uint8_t*>(data);
  stream.room = room;
}

namespace {

using MaybeTensor = std::optional<at::Tensor>;

const std::vector<Build<DeltaKernels>>& builds() {
  static const std::vector<Build<DeltaKernels>> all = usable<DeltaKernels>({
#ifdef CHECKNRUN_X86
      {"avx512", &avx512_delta_kernels},
      {"avx2", &avx2_delta_kernels},
#endif
      {"plain", &plain_delta_kernels},
  });
  return all;
}

struct OwnedStreams : Streams {
  OwnedStreams() = default;
  OwnedStreams(const OwnedStreams&) = delete;
  OwnedStreams& operator=(const OwnedStreams&) = delete;
  ~OwnedStreams() {
    std::free(extra.data);
    for (auto& of_class : planes) {
      for (Stream& plane : of_class) std::free(plane.data);
    }
  }
};

template <typename T>
T* memory_of(const at::Tensor& tensor, at::IntArrayRef shape, const char* what) {
  TORCH_CHECK_VALUE(tensor.sizes() == shape && tensor.is_contiguous() &&
                        tensor.scalar_type() == c10::CppTypeToScalarType<T>::value &&
                        tensor.device().is_cpu(),
                    what, " must be contiguous ", c10::CppTypeToScalarType<T>::value, " of ",
                    shape, " on the CPU, not ", tensor.scalar_type(), " ", tensor.sizes());
  return tensor.mutable_data_ptr<T>();
}

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

void check(DeltaFault fault) {
  TORCH_CHECK_VALUE(fault != kNoPredecessor,
                    "a row is a difference, but has no predecessor on a grid");
  TORCH_CHECK_VALUE(fault != kExponentOutOfRange, "a row's exponent is out of range");
  TORCH_CHECK_VALUE(fault != kCodeOutOfRange, "a row's code exceeds ", kMostCode);
  TORCH_CHECK_VALUE(fault != kNotOnGrid, "a row is neither on a grid nor verbatim");
}

// Calls back with fault = work(begin, end) of parts of n rows; returns the first part's fault.
template <typename Work>
DeltaFault in_parts(int64_t n, int64_t parts, const Work& work) {
  std::vector<DeltaFault> faults(size_t(parts), kSound);
  at::parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
    for (int64_t part = first; part < last; ++part) {
      faults[size_t(part)] = work(part, n * part / parts, n * (part + 1) / parts);
    }
  });
  for (const DeltaFault fault : faults) {
    if (fault != kSound) return fault;
  }
  return kSound;
}

// About 256 KiB of rows pay for a thread.
int64_t parts_of(int64_t n, int64_t dim) {
  return std::clamp<int64_t>(n * dim / 65536, 1, at::get_num_threads());
}

Value value_of(const at::Tensor& weight) {
  switch (weight.scalar_type()) {
    case at::kFloat: return Value::fp32;
    case at::kHalf: return Value::fp16;
    case at::kBFloat16: return Value::bf16;
    default: TORCH_CHECK_TYPE(false, "rows must be float32, float16 or bfloat16, not ",
                              weight.scalar_type());
  }
}

// The bytes of all streams, in the payload's order: symbols, extra, planes by class.
using Sizes = std::vector<int64_t>;

Sizes sizes_of(const uint8_t* symbols, int64_t rows, int64_t dim) {
  std::array<int64_t, 256> counts{};
  for (int64_t r = 0; r < rows; ++r) ++counts[symbols[r]];
  Sizes sizes{rows, 0};
  std::array<int64_t, kClasses> of_class{};
  for (int symbol = 0; symbol < 256; ++symbol) {
    const int64_t count = counts[size_t(symbol)];
    if (count == 0) continue;
    const bool far = symbol >= kFarther, alone = !far && symbol % 8 == kAlone;
    const int c = far ? symbol - kFarther : symbol / 8;
    TORCH_CHECK_VALUE(far ? c < kVerbatimClass : c < kVerbatimClass || alone,
                      "no row has symbol ", symbol);
    of_class[size_t(c)] += count;
    if (far || (alone && c != kVerbatimClass)) sizes[1] += count;
  }
  for (int c = 1; c < kClasses; ++c) {
    for (int p = 0; p < kPlanes.count[c]; ++p) {
      sizes.push_back(of_class[size_t(c)] * plane_bytes(dim, kPlanes.of[c][p].width));
    }
  }
  return sizes;
}

void check_dim(int64_t dim) { TORCH_CHECK_VALUE(dim > 0 && dim < (1 << 24), "dim is ", dim); }

Sizes delta_sizes(const at::Tensor& symbols, int64_t dim) {
  check_dim(dim);
  return sizes_of(bytes_of(symbols, "symbols"), symbols.numel(), dim);
}

// Joins the streams of all parts: symbols, extra, planes by class.
at::Tensor join(const at::Tensor& symbols, const std::vector<OwnedStreams>& parts,
                const Sizes& sizes) {
  int64_t total = 0;
  for (const int64_t size : sizes) total += size;
  at::Tensor data = at::empty({total}, symbols.options());
  uint8_t* at = data.mutable_data_ptr<uint8_t>();
  const auto add = [&](const uint8_t* from, int64_t size) {
    if (size) std::memcpy(at, from, size_t(size));
    at += size;
  };
  add(symbols.const_data_ptr<uint8_t>(), symbols.numel());
  for (const OwnedStreams& part : parts) add(part.extra.data, part.extra.size);
  for (int c = 1; c < kClasses; ++c) {
    for (int p = 0; p < kPlanes.count[c]; ++p) {
      for (const OwnedStreams& part : parts) {
        add(part.planes[c][p].data, part.planes[c][p].size);
      }
    }
  }
  TORCH_INTERNAL_ASSERT(at == data.mutable_data_ptr<uint8_t>() + total);
  return data;
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
  const DeltaKernels& kernels = kernels_of(builds(), std::string(build));
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
  const DeltaKernels& kernels = kernels_of(builds(), std::string(build));
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
  const DeltaKernels& kernels = kernels_of(builds(), std::string(build));
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

// torch.ops.checknrun: the kernel for this machine's instructions, on ATen's threads.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <atomic>
#include <cmath>
#include <string>
#include <vector>

#include "builds.h"
#include "row_vector.h"
#include "row_ops.h"

// Found by native.py in the file's bytes: a library for another torch, or of the sources of another
// checkout, must not even be loaded.
#ifdef CHECKNRUN_TORCH
__attribute__((used)) static const char kBuiltFor[] =
    "checknrun: built for torch " CHECKNRUN_TORCH ";";
#endif
#ifdef CHECKNRUN_SOURCES
__attribute__((used)) static const char kBuiltOf[] =
    "checknrun: built of sources " CHECKNRUN_SOURCES ";";
#endif

namespace checknrun {
namespace {

const std::vector<Build<Kernels>>& builds() {
  static const std::vector<Build<Kernels>> all = usable<Kernels>({
#ifdef CHECKNRUN_X86
      {"avx512", &avx512_kernels},
      {"avx2", &avx2_kernels},
#endif
      {"plain", &plain_kernels},
  });
  return all;
}

}  // namespace

const Kernels& row_kernels(const std::string& build) { return kernels_of(builds(), build); }

Value value_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return Value::fp32;
    case at::kHalf: return Value::fp16;
    case at::kBFloat16: return Value::bf16;
    default: TORCH_CHECK_TYPE(false, "rows must be float32, float16 or bfloat16, not ",
                              tensor.scalar_type());
  }
}

int64_t row_bytes_of(int64_t dim, int64_t bits) {
  TORCH_CHECK_VALUE(bits == 2 || bits == 3 || bits == 4 || bits == 8,
                    "bits must be 2, 3, 4 or 8, not ", bits);
  return code_bytes(dim, int(bits)) + (bits == 8 ? 8 : 4);
}

namespace {

std::vector<std::string> usable_builds() {
  std::vector<std::string> names;
  for (const Build<Kernels>& each : builds()) names.emplace_back(each.name);
  return names;
}

void check_bytes(const at::Tensor& data, int64_t n, int64_t row_bytes) {
  TORCH_CHECK_VALUE(data.dim() == 2 && data.size(0) == n && data.size(1) == row_bytes &&
                        data.is_contiguous() && data.scalar_type() == at::kByte &&
                        data.device().is_cpu(),
                    "expected contiguous uint8 of (", n, ", ", row_bytes, ") on the CPU, not ",
                    data.scalar_type(), " ", data.sizes());
}

void check_rows(const at::Tensor& rows) {
  TORCH_CHECK_VALUE(rows.dim() == 2 && rows.device().is_cpu() &&
                        (rows.size(1) == 1 || rows.stride(1) == 1),
                    "expected rows on the CPU, each in one piece, not ", rows.sizes(),
                    " with strides ", rows.strides());
}

// About 32 KiB of rows pay for a thread.
int64_t grain(int64_t dim) { return std::max<int64_t>(16, 8192 / std::max<int64_t>(dim, 1)); }

int64_t encode_rows(const at::Tensor& rows, const std::optional<at::Tensor>& ids, int64_t bits,
                    int64_t method, int64_t num_bins, double ratio, double factor, at::Tensor out,
                    at::Tensor refused, c10::string_view build) {
  check_rows(rows);
  const int64_t n = ids ? ids->numel() : rows.size(0), dim = rows.size(1);
  TORCH_CHECK_VALUE(dim > 0, "rows have no columns");
  TORCH_CHECK_VALUE(method >= 0 && method <= 3, "unknown method ", method);
  TORCH_CHECK_VALUE(method != 2 || (num_bins > 0 && ratio >= 0 && ratio <= 1),
                    "num_bins must be positive and ratio between 0 and 1");
  const int64_t row_bytes = row_bytes_of(dim, bits);
  check_bytes(out, n, row_bytes);
  TORCH_CHECK_VALUE(refused.dim() == 1 && refused.numel() == n && refused.is_contiguous() &&
                        refused.scalar_type() == at::kByte,
                    "refused must be ", n, " contiguous uint8");
  const EncodeJob job{rows.const_data_ptr(), value_of(rows), row_vector(ids, rows.size(0)),
                      rows.stride(0), dim, int(bits), Method(method), int(num_bins), float(ratio),
                      float(factor), false, out.mutable_data_ptr<uint8_t>(), row_bytes,
                      refused.mutable_data_ptr<uint8_t>()};
  const Kernels& kernels = row_kernels(std::string(build));
  std::atomic<int64_t> refusals{0};
  at::parallel_for(0, n, grain(dim), [&](int64_t begin, int64_t end) {
    refusals += kernels.encode(job, begin, end);
  });
  return refusals;
}

void decode_rows(const at::Tensor& data, int64_t bits, double factor,
                 const std::optional<at::Tensor>& ids, at::Tensor out, c10::string_view build,
                 const std::optional<at::Tensor>& positions) {
  check_rows(out);
  const int64_t n = ids ? ids->numel() : out.size(0), dim = out.size(1);
  const int64_t row_bytes = row_bytes_of(dim, bits), stored = positions ? data.size(0) : n;
  check_bytes(data, stored, row_bytes);
  TORCH_CHECK_VALUE(!positions || positions->numel() == n, "expected ", n, " positions");
  const DecodeJob job{data.const_data_ptr<uint8_t>(), row_vector(positions, stored), row_bytes,
                      dim, int(bits), float(factor), row_vector(ids, out.size(0)),
                      out.mutable_data_ptr(), value_of(out), out.stride(0)};
  const Kernels& kernels = row_kernels(std::string(build));
  at::parallel_for(0, n, grain(dim),
                   [&](int64_t begin, int64_t end) { kernels.decode(job, begin, end); });
}

}  // namespace
}  // namespace checknrun

TORCH_LIBRARY(checknrun, library) {
  library.def(
      "encode_rows(Tensor rows, Tensor? ids, int bits, int method, int num_bins, float ratio, "
      "float factor, Tensor(a!) out, Tensor(b!) refused, str build) -> int",
      checknrun::encode_rows);
  library.def(
      "decode_rows(Tensor data, int bits, float factor, Tensor? ids, Tensor(a!) out, str build, "
      "Tensor? positions=None) -> ()",
      checknrun::decode_rows);
  library.def("kernel_builds() -> str[]", checknrun::usable_builds);
}

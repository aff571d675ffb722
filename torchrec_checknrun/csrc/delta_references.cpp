// torch.ops.checknrun: keep rows' integers as bytes, and digest rows; NumPy's twins are in delta/.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "delta.h"

namespace checknrun {
namespace {

template <typename T>
T* data_of(const at::Tensor& tensor, int64_t count, at::ScalarType type, const char* what) {
  TORCH_CHECK_VALUE(tensor.is_cpu() && tensor.is_contiguous() && tensor.scalar_type() == type &&
                        tensor.numel() == count,
                    what, ": expected ", count, " values in one piece on the CPU");
  return static_cast<T*>(tensor.data_ptr());
}

struct Rows {
  int64_t n, dim;
  uint8_t* kind;
  int16_t* exponent;
  int32_t* codes;
};

Rows rows_of(const at::Tensor& kind, const at::Tensor& exponent, const at::Tensor& codes) {
  TORCH_CHECK_VALUE(codes.dim() == 2, "codes must have two dimensions");
  const int64_t n = codes.size(0), dim = codes.size(1);
  return {n, dim, data_of<uint8_t>(kind, n, at::kByte, "kind"),
          data_of<int16_t>(exponent, n, at::kShort, "exponent"),
          data_of<int32_t>(codes, n * dim, at::kInt, "codes")};
}

struct Held {
  int64_t rows, slot;
  uint8_t *forms, *exponents, *slots;
};

Held held_of(const at::Tensor& forms, const at::Tensor& exponents, const at::Tensor& slots,
             int64_t dim) {
  TORCH_CHECK_VALUE(slots.dim() == 2 && slots.size(1) >= dim && slots.size(1) >= 8,
                    "slots are too narrow");
  const int64_t n = slots.size(0), slot = slots.size(1);
  return {n, slot, data_of<uint8_t>(forms, n, at::kByte, "forms"),
          data_of<uint8_t>(exponents, n, at::kByte, "exponents"),
          data_of<uint8_t>(slots, n * slot, at::kByte, "slots")};
}

const int64_t* positions_of(const at::Tensor& positions, int64_t n, int64_t rows) {
  const int64_t* at = data_of<int64_t>(positions, n, at::kLong, "positions");
  for (int64_t i = 0; i < n; ++i) {
    TORCH_CHECK_INDEX(0 <= at[i] && at[i] < rows, "row ", at[i], " of ", rows);
  }
  return at;
}

void delta_digests(const at::Tensor& ids, int64_t first, int64_t last, const at::Tensor& kind,
                   const at::Tensor& exponent, const at::Tensor& codes, at::Tensor out) {
  const Rows rows = rows_of(kind, exponent, codes);
  const int64_t* id = data_of<int64_t>(ids, rows.n, at::kLong, "ids");
  int64_t* to = data_of<int64_t>(out, rows.n, at::kLong, "out");
  std::vector<uint64_t> factors(size_t(rows.dim));
  for (int64_t j = 0; j < rows.dim; ++j) factors[size_t(j)] = mixed(uint64_t(j)) | 1;
  const uint64_t start = mixed(uint64_t(first)), stop = mixed(uint64_t(last)) << 1;
  for (int64_t i = 0; i < rows.n; ++i) {
    uint64_t place = mixed(uint64_t(id[i]) ^ start) ^ stop;
    place = mixed(place ^ uint64_t(rows.kind[i]) << 32 ^ uint64_t(rows.exponent[i] + 1024));
    const int32_t* row = rows.codes + i * rows.dim;
    uint64_t sum = 0;
    for (int64_t j = 0; j < rows.dim; ++j) sum += uint64_t(uint32_t(row[j])) * factors[size_t(j)];
    to[i] = rows.kind[i] == kNone ? 0 : int64_t(mixed(place + sum));
  }
}

// Returns whether some rows lie beside; their codes are left for the caller.
bool delta_gather(const at::Tensor& positions, const at::Tensor& forms,
                  const at::Tensor& exponents, const at::Tensor& slots, at::Tensor kind,
                  at::Tensor exponent, at::Tensor codes) {
  const Rows rows = rows_of(kind, exponent, codes);
  const Held held = held_of(forms, exponents, slots, rows.dim);
  const int64_t* at = positions_of(positions, rows.n, held.rows);
  bool beside = false;
  for (int64_t i = 0; i < rows.n; ++i) {
    const uint8_t form = held.forms[at[i]];
    int32_t* to = rows.codes + i * rows.dim;
    const int8_t* from = reinterpret_cast<const int8_t*>(held.slots + at[i] * held.slot);
    if (form == kBytes) {
      for (int64_t j = 0; j < rows.dim; ++j) to[j] = from[j];
    } else {
      std::memset(to, 0, size_t(rows.dim) * sizeof(int32_t));
      beside |= form == kShort || form == kLong;
    }
    const bool on_grid = form != kFormNone && form != kDigest;
    rows.kind[i] = on_grid ? kGrid : form == kDigest ? kVerbatim : kNone;
    rows.exponent[i] = on_grid ? int16_t(held.exponents[at[i]] - kFormBias) : int16_t(0);
  }
  return beside;
}

// Returns whether some rows are to lie beside; their codes are left for the caller.
bool delta_scatter(const at::Tensor& positions, const at::Tensor& kind,
                   const at::Tensor& exponent, const at::Tensor& codes, const at::Tensor& digests,
                   at::Tensor forms, at::Tensor exponents, at::Tensor slots) {
  const Rows rows = rows_of(kind, exponent, codes);
  const Held held = held_of(forms, exponents, slots, rows.dim);
  const int64_t* at = positions_of(positions, rows.n, held.rows);
  const int64_t* digest = data_of<int64_t>(digests, rows.n, at::kLong, "digests");
  bool beside = false;
  for (int64_t i = 0; i < rows.n; ++i) {
    uint8_t* to = held.slots + at[i] * held.slot;
    const int32_t* row = rows.codes + i * rows.dim;
    uint8_t form = rows.kind[i] == kVerbatim ? kDigest : kFormNone;
    if (rows.kind[i] == kGrid) {
      uint32_t large = 0;  // bits of magnitudes
      for (int64_t j = 0; j < rows.dim; ++j) large |= uint32_t(row[j] < 0 ? -row[j] : row[j]);
      form = large < 128 ? kBytes : large < 32768 ? kShort : kLong;
    }
    if (form == kBytes) {
      for (int64_t j = 0; j < rows.dim; ++j) to[j] = uint8_t(row[j]);
    } else if (form == kDigest) {
      std::memcpy(to, digest + i, sizeof(int64_t));
    }
    beside |= form == kShort || form == kLong;
    held.forms[at[i]] = form;
    held.exponents[at[i]] = uint8_t(rows.kind[i] == kGrid ? rows.exponent[i] + kFormBias : 0);
  }
  return beside;
}

}  // namespace
}  // namespace checknrun

TORCH_LIBRARY_FRAGMENT(checknrun, library) {
  library.def(
      "delta_digests(Tensor ids, int first, int last, Tensor kind, Tensor exponent, Tensor codes, "
      "Tensor(a!) out) -> ()",
      checknrun::delta_digests);
  library.def(
      "delta_gather(Tensor positions, Tensor forms, Tensor exponents, Tensor slots, "
      "Tensor(a!) kind, Tensor(b!) exponent, Tensor(c!) codes) -> bool",
      checknrun::delta_gather);
  library.def(
      "delta_scatter(Tensor positions, Tensor kind, Tensor exponent, Tensor codes, "
      "Tensor digests, Tensor(a!) forms, Tensor(b!) exponents, Tensor(c!) slots) -> bool",
      checknrun::delta_scatter);
}

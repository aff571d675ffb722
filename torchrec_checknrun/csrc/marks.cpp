// torch.ops.checknrun: sets of rows, one bit per row, made of mark bytes while training waits.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "row_vector.h"

namespace checknrun {
namespace {

constexpr uint64_t kEveryByte = 0x0101010101010101ull;

void check_bytes(const at::Tensor& bytes, const char* what) {
  TORCH_CHECK_VALUE(bytes.dim() == 1 && bytes.is_contiguous() &&
                        bytes.scalar_type() == at::kByte && bytes.device().is_cpu(),
                    what, " must be contiguous uint8 on the CPU");
}

// Sets bit k of the result if byte k is not zero.
uint8_t nonzero_bytes(uint64_t bytes) {
  constexpr uint64_t low = 0x7f * kEveryByte;
  const uint64_t high = (((bytes & low) + low) | bytes) & ~low;
  return uint8_t(((high >> 7) * 0x0102040810204080ull) >> 56);
}

void pack_marks(const at::Tensor& marks, int64_t bits, at::Tensor packed) {
  check_bytes(marks, "marks");
  check_bytes(packed, "packed");
  const int64_t rows = marks.numel();
  TORCH_CHECK_VALUE(packed.numel() == (rows + 7) / 8, "packed must have a bit for each mark");
  const uint8_t* from = marks.const_data_ptr<uint8_t>();
  uint8_t* into = packed.mutable_data_ptr<uint8_t>();
  int64_t row = 0;
#if defined(__SSE2__)  // on every x86-64
  const __m128i none = _mm_setzero_si128();
  const __m128i wanted16 = _mm_set1_epi8(char(bits));
  for (; row + 16 <= rows; row += 16) {
    const __m128i sixteen = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + row));
    const __m128i unmarked = _mm_cmpeq_epi8(_mm_and_si128(sixteen, wanted16), none);
    const uint16_t marked = uint16_t(~_mm_movemask_epi8(unmarked));
    std::memcpy(into + row / 8, &marked, sizeof marked);
  }
#endif
  const uint64_t wanted = uint64_t(bits & 255) * kEveryByte;
  for (; row < rows; row += 8) {
    uint64_t eight = 0;
    const size_t size = size_t(std::min<int64_t>(8, rows - row));
    std::memcpy(&eight, from + row, size);
    into[row / 8] = nonzero_bytes(eight & wanted);
  }
}

// Returns 64 bits from ``bit`` on, zero from ``stop`` on.
uint64_t word_at(const uint8_t* packed, int64_t bit, int64_t stop) {
  uint64_t word = 0;
  const int64_t first = bit / 8, last = (stop + 7) / 8;
  std::memcpy(&word, packed + first, size_t(std::min<int64_t>(8, last - first)));
  const int64_t left = stop - first * 8;
  if (left < 64) word &= (uint64_t(1) << left) - 1;
  return word >> (bit % 8) << (bit % 8);
}

at::Tensor positions(const at::Tensor& packed, int64_t start, int64_t stop) {
  check_bytes(packed, "packed");
  TORCH_CHECK_INDEX(0 <= start && start <= stop && stop <= packed.numel() * 8, "rows ", start,
                    " to ", stop);
  const uint8_t* bits = packed.const_data_ptr<uint8_t>();
  int64_t count = 0;
  for (int64_t at = start; at < stop; at = at / 8 * 8 + 64) {
    count += __builtin_popcountll(word_at(bits, at, stop));
  }
  at::Tensor found = at::empty({count}, packed.options().dtype(at::kLong));
  int64_t* into = found.mutable_data_ptr<int64_t>();
  for (int64_t at = start; at < stop; at = at / 8 * 8 + 64) {
    const int64_t base = at / 8 * 8;
    for (uint64_t word = word_at(bits, at, stop); word != 0; word &= word - 1) {
      *into++ = base + __builtin_ctzll(word);
    }
  }
  return found;
}

// Adds rows to the set; returns the positions in ``rows`` of the rows that are new to the set.
at::Tensor add_rows(const at::Tensor& rows, at::Tensor packed) {
  check_bytes(packed, "packed");
  const int64_t n = rows.numel();
  const int64_t* row = row_vector(rows, packed.numel() * 8);
  uint8_t* bits = packed.mutable_data_ptr<uint8_t>();
  at::Tensor found = at::empty({n}, rows.options());
  int64_t* into = found.mutable_data_ptr<int64_t>();
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    uint8_t& eight = bits[row[i] / 8];
    const uint8_t bit = uint8_t(1 << (row[i] % 8));
    into[count] = i;
    count += (eight & bit) == 0;
    eight |= bit;
  }
  return found.narrow(0, 0, count);
}

// Returns (start, stop, count) of ranges with ``size`` rows of the set each; see RowSet.spans.
std::vector<int64_t> spans(const at::Tensor& packed, int64_t rows, int64_t size) {
  check_bytes(packed, "packed");
  TORCH_CHECK_VALUE(size > 0 && packed.numel() == (rows + 7) / 8, "spans of ", size, " rows");
  const uint8_t* bits = packed.const_data_ptr<uint8_t>();
  std::vector<int64_t> found;
  int64_t start = 0, held = 0;
  for (int64_t at = 0; at < rows; at += 64) {
    uint64_t word = word_at(bits, at, rows);
    int64_t here = __builtin_popcountll(word);
    while (held + here > size) {
      for (; held < size; ++held, --here) word &= word - 1;
      const int64_t next = at + __builtin_ctzll(word);
      found.insert(found.end(), {start, next, size});
      start = next;
      held = 0;
    }
    held += here;
  }
  if (held > 0) found.insert(found.end(), {start, rows, held});
  return found;
}

// Marks rows as FBGEMM takes ids: -1 is no row, others that the table lacks are row 0.
template <typename Id>
void mark_ids(const Id* ids, int64_t count, uint8_t* live, int64_t rows, uint8_t bits) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t id = ids[i];
    if (id >= 0 && id < rows) {
      live[id] = bits;
    } else if (id != -1) {
      live[0] = bits;
    }
  }
}

// Marks the rows of a lookup: of feature f the ids from offsets[f] to offsets[f + 1], in the marks
// live[places[f]], which have one byte more than the table has rows; see marks.lookups.
void mark_lookup(const at::Tensor& ids, at::IntArrayRef offsets, at::IntArrayRef places,
                 at::TensorList live, int64_t bits) {
  const bool wide = ids.scalar_type() == at::kLong;
  TORCH_CHECK_VALUE(ids.dim() == 1 && ids.is_contiguous() && ids.device().is_cpu() &&
                        (wide || ids.scalar_type() == at::kInt),
                    "ids must be a contiguous vector of int64 or int32 on the CPU");
  TORCH_CHECK_VALUE(offsets.size() > places.size(), "a feature has no offset");
  for (size_t feature = 0; feature < places.size(); ++feature) {
    const int64_t start = offsets[feature], count = offsets[feature + 1] - start;
    const int64_t place = places[feature];
    TORCH_CHECK_INDEX(0 <= start && 0 <= count && start + count <= ids.numel(), "ids ", start,
                      " to ", start + count, " of ", ids.numel());
    TORCH_CHECK_INDEX(0 <= place && place < int64_t(live.size()), "marks ", place, " of ",
                      live.size());
    uint8_t* marks = bytes_of(live[place], "marks");
    const int64_t rows = live[place].numel() - 1;
    if (rows <= 0) continue;
    if (wide) {
      mark_ids(ids.const_data_ptr<int64_t>() + start, count, marks, rows, uint8_t(bits));
    } else {
      mark_ids(ids.const_data_ptr<int32_t>() + start, count, marks, rows, uint8_t(bits));
    }
  }
}

}  // namespace
}  // namespace checknrun

TORCH_LIBRARY_FRAGMENT(checknrun, library) {
  library.def("pack_marks(Tensor marks, int bits, Tensor(a!) packed) -> ()",
              checknrun::pack_marks);
  library.def("mark_lookup(Tensor ids, int[] offsets, int[] places, Tensor(a!)[] live, int bits) -> ()",
              checknrun::mark_lookup);
  library.def("marked_positions(Tensor packed, int start, int stop) -> Tensor",
              checknrun::positions);
  library.def("add_rows(Tensor rows, Tensor(a!) packed) -> Tensor", checknrun::add_rows);
  library.def("marked_spans(Tensor packed, int rows, int size) -> int[]", checknrun::spans);
}

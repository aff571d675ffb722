// Rows on their own power-of-two grids, as differences to their predecessors: the interface of the
// kernel's three builds, and how differences are laid out.
#pragma once

#include <cstdint>

#include "rows.h"

namespace checknrun {

enum RowKind : uint8_t { kNone = 0, kGrid = 1, kVerbatim = 2 };

constexpr int kLeastExponent = -149, kMostExponent = 104;
constexpr int32_t kMostCode = (1 << 24) - 1;
constexpr int16_t kExact = -32768;  // wanted as an exponent: keep the row bit for bit

// A row's class: the bits of its largest magnitude. Verbatim rows are a class of their own.
constexpr int kVerbatimClass = 26, kClasses = 27;
// The largest drop of an exponent that fits into a row's symbol, class * 8 + drop. 7 stands for a
// row that builds on nothing, kFarther + class for a larger drop; both have an extra byte.
constexpr int kMostDrop = 6, kAlone = 7, kFarther = 216;

// A class's codes, zigzag, are cut into bytes from the top bit on; the rest is the last plane. A
// plane's codes take `width` bits, which divides eight.
struct Plane {
  int low, bits, width;
};
struct Planes {
  int count[kClasses];
  Plane of[kClasses][4];
};
constexpr Planes kPlanes = [] {
  Planes all{};
  for (int c = 1; c < kClasses; ++c) {
    int left = c == kVerbatimClass ? 32 : c + 1;
    while (left > 0) {
      const int bits = left < 8 ? left : 8;
      left -= bits;
      all.of[c][all.count[c]++] = {left, bits, bits > 4 ? 8 : bits > 2 ? 4 : bits};
    }
  }
  return all;
}();

// Returns the bytes of a row of a plane.
inline int64_t plane_bytes(int64_t dim, int width) { return (dim * width + 7) / 8; }

// Bytes that grow; the kernel may write kSlack bytes beyond `size`.
constexpr int64_t kSlack = 64;
struct Stream {
  uint8_t* data = nullptr;
  int64_t size = 0, room = 0;
};
struct Streams {
  Stream extra;
  Stream planes[kClasses][4];
};
void grow(Stream& stream, int64_t more);  // defined in delta_ops.cpp, for every machine

struct GridRows {  // kind is null where there are no rows
  uint8_t* kind;
  int16_t* exponent;
  int32_t* codes;  // (n, dim)
};

struct DeltaEncodeJob {
  const void* weight;  // (n, stride) values, or null: `after` holds the rows
  Value value;
  int64_t stride, dim;
  const int16_t* wanted;
  GridRows before, after;
  uint8_t* symbols;
};

struct DeltaApplyJob {
  const uint8_t* symbols;
  const uint8_t* extra;
  const uint8_t* planes[kClasses][4];
  int64_t dim;            // of the stored rows
  const int64_t* chosen;  // sorted; or null: all from the first
  int64_t first, cols;    // the columns wanted
  GridRows before, after;  // of the chosen rows and columns
};

// How the row of a shard is kept between links: its codes in bytes in its slot, or beside as 16 or
// 32 bits a code at a place that the slot names, or its digest alone.
enum RowForm : uint8_t { kFormNone = 0, kBytes = 1, kShort = 2, kLong = 3, kDigest = 4 };
constexpr int kFormBias = 150;  // added to exponents, which then fit into a byte

inline uint64_t mixed(uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return x ^ x >> 31;
}

struct HeldRows {  // of a whole shard
  uint8_t *forms, *exponents, *slots;
  int64_t slot;  // bytes of a slot, at least 8
  int16_t* shorts;
  int32_t* longs;
  int64_t short_rows, long_rows;
};

struct DeltaLinkJob {
  const void* weight;  // (n, stride) values, which replace the rows at `positions`
  Value value;
  int64_t stride, dim;
  const int16_t* wanted;
  int reset;  // a step larger than its predecessor's by so many powers of two stands alone
  const int64_t* positions;
  int64_t row_start;             // of the shard: position + row_start is the id
  uint64_t first, last;          // the shard's columns, mixed, as digests take them
  const int32_t *low, *high;     // halves of the columns' factors in digests, padded with zeros
  HeldRows held;
  HeldRows old;  // (n, ...): receives the rows as they were, those beside one after the other
  uint8_t* symbols;
};

// What a part of a job's rows gives.
struct DeltaLinkPart {
  Streams streams;
  int64_t done = 0;                    // rows that were replaced
  int64_t short_at = 0, long_at = 0;   // where its old rows beside go, in rows
  Stream freed[2];                     // places beside, short and long, that nothing holds any more
  Stream moved, moved_codes;           // rows that need a place beside, and their codes
  uint64_t before = 0, after = 0;      // sums of digests
};

enum DeltaFault : int {
  kSound = 0,
  kNoPredecessor,
  kExponentOutOfRange,
  kCodeOutOfRange,
  kNotOnGrid,
};

struct DeltaKernels {
  DeltaFault (*encode)(const DeltaEncodeJob&, int64_t begin, int64_t end, Streams&);
  DeltaFault (*apply)(const DeltaApplyJob&, int64_t begin, int64_t end);
  void (*values)(const GridRows&, int64_t dim, float* out, int64_t begin, int64_t end);
  DeltaFault (*link)(const DeltaLinkJob&, int64_t begin, int64_t end, DeltaLinkPart&);
};

extern const DeltaKernels plain_delta_kernels;
#ifdef CHECKNRUN_X86
extern const DeltaKernels avx2_delta_kernels;
extern const DeltaKernels avx512_delta_kernels;
#endif

}  // namespace checknrun

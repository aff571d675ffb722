// Puts rows on their grids, writes the differences to their predecessors by class, and adds them up
// again. Included once for each instruction set; all builds give the same integers and bytes.
//
// Denormal numbers take part only in integer arithmetic: torch may have the processor flush them.
#include "rows_headers.h"
#include "delta.h"
#include "rows_lanes.h"
#include "rows_bits.h"
#include "delta_planes.h"
#include "delta_batch.h"

namespace checknrun {
namespace CHECKNRUN_NAMESPACE {
namespace {

inline float power_of_two(int exponent) {  // -126 to 127
  const uint32_t bits = uint32_t(exponent + 127) << 23;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// Returns the bits of the largest magnitude among values; NaN counts as the largest.
inline int32_t largest_bits(const float* x, int64_t dim) {
  Ints most = {};
  for (int64_t d = 0; d < dim; d += kLanes) {
    most = larger(most, (Ints)load_part<Floats>(x + d, dim - d) & 0x7fffffff);
  }
  return largest(most);
}

inline int32_t largest_magnitude(const int32_t* codes, int64_t dim) {
  Ints most = {};
  for (int64_t d = 0; d < dim; d += kLanes) {
    most = larger(most, magnitudes(load_part<Ints>(codes + d, dim - d)));
  }
  return largest(most);
}

// Returns whether codes on a grid finer by 2^drop have 24 bits at most.
inline bool fits(const int32_t* codes, int64_t dim, int drop) {
  if (drop == 0) return true;
  return int64_t(largest_magnitude(codes, dim)) << std::min(drop, 25) <= kMostCode;
}

// Returns x / 2^exponent, rounded to even, in integers. The exponent is at least that of x - 23.
inline int32_t small_code(float x, int exponent) {
  int32_t bits;
  memcpy(&bits, &x, 4);
  const int field = (bits >> 23) & 255;
  const int32_t mantissa = (bits & 0x7fffff) | (field ? 0x800000 : 0);
  const int shift = exponent - (std::max(field, 1) - 150);
  if (shift > 24) return 0;
  int32_t code = mantissa >> shift;
  const int32_t twice = (mantissa & ((1 << shift) - 1)) * 2, one = 1 << shift;
  code += twice > one || (twice == one && (code & 1));
  return bits < 0 ? -code : code;
}

inline void find_codes(const float* x, int64_t dim, int exponent, int32_t* codes) {
  if (exponent < -125) {  // beside such a step denormal numbers count
    for (int64_t d = 0; d < dim; ++d) codes[d] = small_code(x[d], exponent);
    return;
  }
  const float inverse = power_of_two(-exponent);
  for (int64_t d = 0; d < dim; d += kLanes) {
    store_part(codes + d, nearest_ints(load_part<Floats>(x + d, dim - d) * inverse), dim - d);
  }
}

// Returns whether a code is 65520 or more on its grid, which fp16 rounds to infinity.
inline bool overflows_half(const int32_t* codes, int64_t dim, int exponent) {
  if (exponent < 5) return false;  // finite numbers of fp16 are multiples of 2^5 there
  return int64_t(largest_magnitude(codes, dim)) << std::min(exponent, 16) >= 65520;
}

// Sets z to the zigzag differences; returns their class.
inline int find_differences(const int32_t* codes, const int32_t* base, int drop, int64_t dim,
                            int32_t* z) {
  Ints most = {};
  for (int64_t d = 0; d < dim; d += kLanes) {
    Ints q = load_part<Ints>(codes + d, dim - d);
    if (base) q -= load_part<Ints>(base + d, dim - d) << drop;
    q = zigzag(q);
    most = larger(most, q & 0x7fffffff);
    memcpy(z + d, &q, sizeof q);
  }
  const uint32_t magnitude = (uint32_t(largest(most)) + 1) >> 1;
  return magnitude ? 32 - __builtin_clz(magnitude) : 0;
}

inline const float* row_of(const DeltaEncodeJob& job, int64_t r, float* scratch) {
  const int64_t at = r * job.stride;
  if (job.value == Value::fp32) return static_cast<const float*>(job.weight) + at;
  const uint16_t* from = static_cast<const uint16_t*>(job.weight) + at;
  for (int64_t d = 0; d < job.dim; ++d) {
    const uint32_t bits = uint32_t(from[d]) << 16;
    if (job.value == Value::fp16) scratch[d] = from_half(from[d]);
    else memcpy(scratch + d, &bits, 4);
  }
  return scratch;
}

// Finds a row's grid, and its codes; returns the drop from its predecessor's exponent, or -1 where
// the row stands alone.
inline int settle(const DeltaEncodeJob& job, int64_t r, const float* x) {
  const int64_t dim = job.dim;
  int32_t* codes = job.after.codes + r * dim;
  const int32_t bits = largest_bits(x, dim);
  if (bits < 0x7f800000 && job.wanted[r] != kExact) {
    const int least = std::max((bits >> 23) - 150, kLeastExponent);
    int exponent = std::min(std::max<int>(job.wanted[r], least), kMostExponent), drop = -1;
    if (job.before.kind && job.before.kind[r] == kGrid) {
      const int finer = std::min<int>(exponent, job.before.exponent[r]);
      const int farther = job.before.exponent[r] - finer;
      if (finer >= least && fits(job.before.codes + r * dim, dim, farther)) {
        exponent = finer;
        drop = farther;
      }
    }
    find_codes(x, dim, exponent, codes);
    if (job.value != Value::fp16 || !overflows_half(codes, dim, exponent)) {
      job.after.kind[r] = kGrid;
      job.after.exponent[r] = int16_t(exponent);
      return drop;
    }
  }
  job.after.kind[r] = kVerbatim;
  job.after.exponent[r] = 0;
  memcpy(codes, x, dim * 4);
  return -1;
}

// As settle, of a row that lies on its grid already.
inline int settled(const DeltaEncodeJob& job, int64_t r) {
  if (job.after.kind[r] != kGrid || !job.before.kind || job.before.kind[r] != kGrid) return -1;
  const int drop = job.before.exponent[r] - job.after.exponent[r];
  return drop >= 0 && fits(job.before.codes + r * job.dim, job.dim, drop) ? drop : -1;
}

inline DeltaFault fault_of(const DeltaEncodeJob& job, int64_t r) {
  const uint8_t kind = job.after.kind[r];
  const int exponent = job.after.exponent[r];
  if (kind != kGrid && kind != kVerbatim) return kNotOnGrid;
  if (kind == kVerbatim) return kSound;
  if (exponent < kLeastExponent || exponent > kMostExponent) return kExponentOutOfRange;
  const int32_t most = largest_magnitude(job.after.codes + r * job.dim, job.dim);
  return most < 0 || most > kMostCode ? kCodeOutOfRange : kSound;
}

// Writes a row's symbol, and sets row i of a batch to what its planes hold.
inline DeltaFault add_row(const DeltaEncodeJob& job, int64_t r, int drop, int64_t i, Batch& batch,
                          Streams& out) {
  const int64_t dim = job.dim;
  const int32_t* codes = job.after.codes + r * dim;
  if (job.after.kind[r] == kVerbatim) {
    memcpy(batch.row(i), codes, dim * 4);
    batch.classes[i] = kVerbatimClass;
    job.symbols[r] = kVerbatimClass * 8 + kAlone;
    return kSound;
  }
  const bool alone = drop < 0;
  const int32_t* base = alone ? nullptr : job.before.codes + r * dim;
  const int c = find_differences(codes, base, std::min(std::max(drop, 0), 31), dim, batch.row(i));
  if (c >= kVerbatimClass) return kCodeOutOfRange;  // only of a predecessor that is not sound
  if (alone) *append(out.extra, 1) = uint8_t(job.after.exponent[r] - kLeastExponent);
  else if (drop > kMostDrop) *append(out.extra, 1) = uint8_t(drop);
  const bool near = !alone && drop <= kMostDrop;
  batch.classes[i] = uint8_t(c);
  job.symbols[r] = uint8_t(alone ? c * 8 + kAlone : near ? c * 8 + drop : kFarther + c);
  return kSound;
}

DeltaFault encode(const DeltaEncodeJob& job, int64_t begin, int64_t end, Streams& out) {
  const Buffer<float> scratch(job.dim);
  Batch batch(job.dim);
  for (int64_t start = begin; start < end; start += batch.most) {
    const int64_t n = std::min(batch.most, end - start);
    for (int64_t r = start; r < start + n; ++r) {
      int drop;
      if (job.weight) {
        drop = settle(job, r, row_of(job, r, scratch.data));
      } else {
        const DeltaFault fault = fault_of(job, r);
        if (fault != kSound) return fault;
        drop = settled(job, r);
      }
      const DeltaFault fault = add_row(job, r, drop, r - start, batch, out);
      if (fault != kSound) return fault;
    }
    write_planes(batch, n, out);
  }
  return kSound;
}

inline int class_of(uint8_t symbol) {
  return symbol >= kFarther ? symbol - kFarther : symbol >> 3;
}

inline bool has_extra(uint8_t symbol) {
  return symbol >= kFarther || ((symbol & 7) == kAlone && symbol >> 3 != kVerbatimClass);
}

// Sets codes to the chosen columns of a row; returns the largest magnitudes.
inline Ints add_up(const int32_t* z, const int32_t* base, int drop, int64_t cols, int32_t* codes) {
  Ints most = {};
  for (int64_t d = 0; d < cols; d += kLanes) {
    Ints q = unzigzag(load_ints(z + d));
    if (base) q += load_part<Ints>(base + d, cols - d) << drop;
    store_part(codes + d, q, cols - d);
    if (cols - d >= kLanes) most = larger(most, magnitudes(q));
    else most = larger(most, magnitudes(load_part<Ints>(codes + d, cols - d)));
  }
  return most;
}

// Sets row i of the result, from its zigzag codes and its extra byte.
inline DeltaFault put_row(const DeltaApplyJob& job, uint8_t symbol, uint8_t extra, int64_t i,
                          const int32_t* z, Ints& most) {
  const bool far = symbol >= kFarther, alone = !far && (symbol & 7) == kAlone;
  int32_t* codes = job.after.codes + i * job.cols;
  if (class_of(symbol) == kVerbatimClass) {
    memcpy(codes, z + job.first, job.cols * 4);
    job.after.kind[i] = kVerbatim;
    job.after.exponent[i] = 0;
    return kSound;
  }
  int exponent = extra + kLeastExponent, drop = 0;
  const int32_t* base = nullptr;
  if (!alone) {
    if (!job.before.kind || job.before.kind[i] != kGrid) return kNoPredecessor;
    base = job.before.codes + i * job.cols;
    drop = far ? extra : symbol & 7;
    exponent = job.before.exponent[i] - drop;
    if (!fits(base, job.cols, drop)) return kCodeOutOfRange;
  }
  if (exponent < kLeastExponent || exponent > kMostExponent) return kExponentOutOfRange;
  job.after.kind[i] = kGrid;
  job.after.exponent[i] = int16_t(exponent);
  most = larger(most, add_up(z + job.first, base, std::min(drop, 31), job.cols, codes));
  return kSound;
}

// Reads rows begin to end of the chosen ones.
DeltaFault apply(const DeltaApplyJob& job, int64_t begin, int64_t end) {
  Batch batch(job.dim);
  int64_t rows[kClasses] = {}, extra = 0, r = 0;  // before row r: of each class, with extra bytes
  int64_t places[kMostBatch];
  uint8_t symbols[kMostBatch], extras[kMostBatch];
  Ints most = {};
  for (int64_t start = begin; start < end; start += batch.most) {
    const int64_t n = std::min(batch.most, end - start);
    for (int64_t i = 0; i < n; ++i) {
      for (const int64_t wanted = job.chosen ? job.chosen[start + i] : start + i; r < wanted; ++r) {
        ++rows[class_of(job.symbols[r])];
        extra += has_extra(job.symbols[r]);
      }
      const uint8_t symbol = symbols[i] = job.symbols[r];
      batch.classes[i] = uint8_t(class_of(symbol));
      places[i] = rows[batch.classes[i]];
      extras[i] = has_extra(symbol) ? job.extra[extra] : 0;
    }
    read_planes(batch, n, job.planes, places);
    for (int64_t i = 0; i < n; ++i) {
      const DeltaFault fault = put_row(job, symbols[i], extras[i], start + i, batch.row(i), most);
      if (fault != kSound) return fault;
    }
  }
  return largest(most) > kMostCode ? kCodeOutOfRange : kSound;
}

// Returns code * 2^exponent for exponents below -126, whose powers are denormal.
inline float small_value(int32_t code, int exponent) {
  uint64_t whole = uint64_t(code < 0 ? -int64_t(code) : code) << (exponent - kLeastExponent);
  uint32_t bits = uint32_t(whole);  // in steps of 2^-149: the bits of a denormal number
  if (whole >> 23) {
    const int last = 63 - __builtin_clzll(whole);
    bits = uint32_t(last - 22) << 23 | (uint32_t(whole >> (last - 23)) & 0x7fffff);
  }
  bits |= code < 0 ? 0x80000000u : 0;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

void values(const GridRows& rows, int64_t dim, float* out, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const int32_t* codes = rows.codes + r * dim;
    float* to = out + r * dim;
    const int exponent =
        std::min(std::max<int>(rows.exponent[r], kLeastExponent), kMostExponent);
    if (rows.kind[r] == kVerbatim) {
      memcpy(to, codes, dim * 4);
    } else if (exponent < -126) {
      for (int64_t d = 0; d < dim; ++d) to[d] = small_value(codes[d], exponent);
    } else {
      const float step = power_of_two(exponent);
      for (int64_t d = 0; d < dim; d += kLanes) {
        const Ints part = load_part<Ints>(codes + d, dim - d);
        store_part(to + d, __builtin_convertvector(part, Floats) * step, dim - d);
      }
    }
  }
}

}  // namespace
}  // namespace CHECKNRUN_NAMESPACE
}  // namespace checknrun

#include "delta_link_kernel.h"

namespace checknrun::CHECKNRUN_NAMESPACE {
constexpr DeltaKernels delta_kernels = {encode, apply, values, link};
}  // namespace checknrun::CHECKNRUN_NAMESPACE

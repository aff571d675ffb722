// Converts rows to codes and back, CHECKNRUN_LANES rows at a time: a lane is a row, so that the
// range search needs no horizontal sums. Included once for each instruction set; all builds give
// the same bytes: every operation is one IEEE operation per lane, in the same order, and the
// compiler may not contract them (-ffp-contract=off).
#include "rows_headers.h"
#include "rows_lanes.h"
#include "rows_bits.h"
#include "rows_grids.h"

namespace checknrun {
namespace CHECKNRUN_NAMESPACE {
namespace {

inline Bytes codes_of(Floats x, float bias, float inverse, Floats top) {
  const Floats t = (x - bias) * inverse;
  return __builtin_convertvector(
      __builtin_convertvector(nearest(lower(higher(t, Floats{}), top)), Ints), Bytes);
}

template <int bits, bool half_scale = bits != 8>
inline void write_row(const float* x, int64_t dim, float bias, float scale, float inverse,
                      uint8_t* out) {
  constexpr int kStep = kLanes < 8 ? 8 : kLanes;
  const Floats top = all(float((1 << bits) - 1));
  const int64_t size = code_bytes(dim, bits);
  uint64_t eights[kStep / 8];
  uint8_t* const codes = reinterpret_cast<uint8_t*>(eights);
  int64_t d = 0, at = 0;
  for (; d + kStep <= dim; d += kStep) {
    for (int i = 0; i < kStep; i += kLanes) {
      const Bytes bytes = codes_of(load(x + d + i), bias, inverse, top);
      memcpy(codes + i, &bytes, kLanes);
    }
    for (const uint64_t eight : eights) {
      const uint64_t packed = bits == 8 ? eight : pack8(eight, bits);
      memcpy(out + at, &packed, bits);
      at += bits;
    }
  }
  if (d < dim) {
    memset(codes, 0, kStep);
    for (int64_t i = 0; d + i < dim; i += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, dim - d - i);
      Floats rest = all(bias);
      memcpy(&rest, x + d + i, count * 4);
      const Bytes bytes = codes_of(rest, bias, inverse, top);
      memcpy(codes + i, &bytes, count);
    }
    for (int i = 0; at < size; ++i) {
      const uint64_t packed = bits == 8 ? eights[i] : pack8(eights[i], bits);
      const int64_t count = std::min<int64_t>(bits, size - at);
      memcpy(out + at, &packed, count);
      at += count;
    }
  }
  if (!half_scale) {
    const float tail[2] = {scale, bias};
    memcpy(out + size, tail, 8);
  } else {
    const uint16_t tail[2] = {to_half(scale), to_half(bias)};
    memcpy(out + size, tail, 4);
  }
}

inline void write_row(const EncodeJob& job, const float* x, float bias, float scale, float range,
                      uint8_t* out) {
  float inverse = 1.f / scale;
  switch (job.bits) {
    case 8:
      if (job.half_scale) return write_row<8, true>(x, job.dim, bias, scale, inverse, out);
      // FBGEMM's own way to keep clear of a division by zero
      if (job.method != Method::symmetric) inverse = 255.f / (range + 1e-8f);
      return write_row<8>(x, job.dim, bias, scale, inverse, out);
    case 4:
      return write_row<4>(x, job.dim, bias, scale, inverse, out);
    case 3:
      return write_row<3>(x, job.dim, bias, scale, inverse, out);
    default:
      return write_row<2>(x, job.dim, bias, scale, inverse, out);
  }
}

constexpr float kMostHalf = 65504.f;
constexpr float kMostFloat = 8.5e37f;           // a quarter of the largest: ranges stay finite
constexpr float kLeast = 1.52587890625e-05f;    // 2^-16: below, a fp16 scale has too few bits
constexpr float kLeastHalved = 3.0517578125e-05f;  // 2^-15 a step: below, half a scale is subnormal
// By bits: below this range the largest value may get a lower code than the last one, and a
// different one at every pass, because the scale is rounded to fp16 (at 8 bits: because FBGEMM adds
// 1e-8 to the range). Beside values that are not small the effect is negligible.
constexpr float kLeastRange[9] = {0, 0, 6e-7f, 3.2e-6f, 1.5e-5f, 0, 0, 0, 5.5e-6f};
constexpr float kSmall = 0.015625f;

inline bool all_finite(const float* row, int64_t dim) {
  for (int64_t d = 0; d < dim; ++d) {
    if (!std::isfinite(row[d])) return false;
  }
  return true;
}

inline bool has_both_zeros(const float* row, int64_t dim) {
  bool found[2] = {false, false};
  for (int64_t d = 0; d < dim; ++d) {
    if (row[d] == 0) found[std::signbit(row[d])] = true;
  }
  return found[0] && found[1];
}

// `low` and `high` are a row's extremes, meaningless where a value lies outside the limits.
inline uint8_t refusal(const EncodeJob& job, const float* row, bool outside, float low,
                       float high) {
  if (outside) return all_finite(row, job.dim) ? too_large : not_finite;
  if (job.half_scale && low == 0 && has_both_zeros(row, job.dim)) return two_zeros;
  const float most = std::max(std::fabs(low), std::fabs(high));
  const bool halved = job.method == Method::symmetric && job.bits < 8;
  if (most > 0 && most < (halved ? kLeastHalved * ((1 << job.bits) - 1) : kLeast)) return too_small;
  const float range = high - low;
  const bool drifts = range > 0 && range < kLeastRange[job.bits] && most < kSmall;
  return drifts ? too_small : encoded;
}

// Returns the zero that FBGEMM takes as a row's minimum of zero, since the bias keeps its sign: the
// last zero of the first of eight lanes that has one.
inline float fbgemm_zero(const float* x, int64_t dim) {
  const int64_t whole = dim / 8 * 8;
  for (int64_t lane = 0; lane < 8 && whole; ++lane) {
    for (int64_t d = whole - 8 + lane; d >= 0; d -= 8) {
      if (x[d] == 0) return x[d];
    }
  }
  return *std::find(x + whole, x + dim, 0.f);
}

template <int by, typename V, int... I>
inline V rotated(V x, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(x, x, ((I + by) % kLanes)...);
}

template <int width = kLanes / 2>
inline float lowest(Floats x) {
  if constexpr (width == 0) {
    return x[0];
  } else {
    const Floats y = rotated<width>(x, std::make_integer_sequence<int, kLanes>());
    return lowest<width / 2>(lower(x, y));
  }
}

template <int width = kLanes / 2>
inline bool any(Ints x) {
  if constexpr (width == 0) {
    return x[0] != 0;
  } else {
    const Ints y = rotated<width>(x, std::make_integer_sequence<int, kLanes>());
    return any<width / 2>(x | y);
  }
}

constexpr int kAhead = 24;  // rows: fetching one from memory takes as long as encoding so many

// Encodes rows one after another, for methods that need only a row's extremes; computes their grids
// together.
inline int64_t encode_by_row(const EncodeJob& job, int64_t begin, int64_t end) {
  const int64_t dim = job.dim;
  const Buffer<float> scratch(job.value == Value::fp32 && job.factor == 1.f ? 0 : kLanes * dim);
  const float limit = job.bits == 8 && !job.half_scale ? kMostFloat : kMostHalf;
  int64_t refusals = 0;
  for (int64_t r = begin; r < end; r += kLanes) {
    const int count = int(std::min<int64_t>(kLanes, end - r));
    const float* rows[kLanes];
    find_rows(job, r, count, scratch.data, rows);
    Floats low = {}, high = {}, poison = {};  // NaN after a NaN or an infinity
    for (int i = 0; i < count; ++i) {
      if (job.ids && r + i + kAhead < end) prefetch_row(job, r + i + kAhead);
      const float* x = rows[i];
      Floats least = all(x[0]), most = least;
      int64_t d = 0;
      for (; d + kLanes <= dim; d += kLanes) {
        const Floats v = load(x + d);
        least = lower(v, least);
        most = higher(v, most);
        poison = fused(v, Floats{}, poison);
      }
      if (d < dim) {
        Floats v = all(x[0]);
        memcpy(&v, x + d, (dim - d) * 4);
        least = lower(v, least);
        most = higher(v, most);
        poison = fused(v, Floats{}, poison);
      }
      low[i] = lowest(least);
      high[i] = -lowest(-most);
      if (low[i] == 0) low[i] = fbgemm_zero(x, dim);
      if (high[i] == 0) high[i] = low[i] == 0 ? low[i] : 0.f;
    }
    const bool poisoned = any((Ints)magnitude(poison));
    const Grid grid = find_grid(job, nullptr, nullptr, low, high, Floats{});
    for (int i = 0; i < count; ++i) {
      uint8_t* out = job.out + (r + i) * job.row_bytes;
      const bool outside = !(low[i] >= -limit && high[i] <= limit) ||
                           (poisoned && !all_finite(rows[i], dim));
      job.refused[r + i] = refusal(job, rows[i], outside, low[i], high[i]);
      if (job.refused[r + i]) {
        ++refusals;
        memset(out, 0, job.row_bytes);
        continue;
      }
      write_row(job, rows[i], grid.bias[i], grid.scale[i], high[i] - low[i], out);
    }
  }
  return refusals;
}

// Encodes rows side by side in lanes.
inline int64_t encode_by_lane(const EncodeJob& job, int64_t begin, int64_t end) {
  const int64_t dim = job.dim, padded = (dim + kLanes - 1) / kLanes * kLanes;
  const Buffer<float> scratch(job.value == Value::fp32 && job.factor == 1.f ? 0 : kLanes * dim);
  const Buffer<Floats> columns(2 * padded);
  Floats* x = columns.data;
  const Floats limit = all(job.bits == 8 ? kMostFloat : kMostHalf);
  int64_t refusals = 0;
  for (int64_t r = begin; r < end; r += kLanes) {
    const int count = int(std::min<int64_t>(kLanes, end - r));
    if (job.ids) {
      for (int64_t i = r + 2 * kLanes; i < std::min(r + 3 * kLanes, end); ++i) prefetch_row(job, i);
    }
    const float* rows[kLanes];
    find_rows(job, r, count, scratch.data, rows);
    for (int i = count; i < kLanes; ++i) rows[i] = rows[0];
    transpose(rows, dim, x);
    Floats low = x[0], high = x[0], sum = x[0];
    Ints outside = ~(magnitude(x[0]) <= limit);
    for (int64_t d = 1; d < dim; ++d) {
      low = lower(x[d], low);
      high = higher(x[d], high);
      sum += x[d];
      outside |= ~(magnitude(x[d]) <= limit);
    }
    for (int i = 0; i < count; ++i) {
      if (low[i] == 0) low[i] = fbgemm_zero(rows[i], dim);
    }
    const Grid grid = find_grid(job, x, x + padded, low, high, sum / float(dim));
    for (int i = 0; i < count; ++i) {
      uint8_t* out = job.out + (r + i) * job.row_bytes;
      job.refused[r + i] = refusal(job, rows[i], outside[i], low[i], high[i]);
      if (job.refused[r + i]) {
        ++refusals;
        memset(out, 0, job.row_bytes);
        continue;
      }
      write_row(job, rows[i], grid.bias[i], grid.scale[i], high[i] - low[i], out);
    }
  }
  return refusals;
}

int64_t encode(const EncodeJob& job, int64_t begin, int64_t end) {
  const bool searches = job.bits < 8 && job.method >= Method::greedy;
  return searches ? encode_by_lane(job, begin, end) : encode_by_row(job, begin, end);
}

inline uint16_t to_bfloat16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// With an fp16 scale the product with up to four bits is exact, so fused and separate adds agree.
template <int bits>
inline Floats decoded(Floats code, float scale, float bias) {
  return bits == 8 ? fused(code, all(scale), all(bias)) : code * scale + bias;
}

template <int bits>
inline void decode_rows(const DecodeJob& job, int64_t begin, int64_t end) {
  const int64_t dim = job.dim, size = code_bytes(dim, bits);
  const Buffer<uint8_t> codes(dim + 64);
  const Buffer<float> values(dim);
  for (int64_t r = begin; r < end; ++r) {
    const uint8_t* row = job.data + (job.positions ? job.positions[r] : r) * job.row_bytes;
    const uint8_t* from = row;
    float scale, bias;
    if (bits == 8) {
      memcpy(&scale, row + size, 4);
      memcpy(&bias, row + size + 4, 4);
    } else {
      uint16_t tail[2];
      memcpy(tail, row + size, 4);
      scale = from_half(tail[0]);
      bias = from_half(tail[1]);
      int64_t d = 0, at = 0;
      for (; d + 8 <= dim; d += 8, at += bits) {
        uint64_t eight = 0;
        memcpy(&eight, row + at, bits);
        eight = unpack8(eight, bits);
        memcpy(codes.data + d, &eight, 8);
      }
      if (d < dim) {
        uint64_t rest = 0;
        memcpy(&rest, row + at, size - at);
        rest = unpack8(rest, bits);
        memcpy(codes.data + d, &rest, 8);
      }
      from = codes.data;
    }
    const int64_t at = (job.ids ? job.ids[r] : r) * job.row_stride;
    float* to = job.value == Value::fp32 ? static_cast<float*>(job.out) + at : values.data;
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) {
      Bytes bytes;
      memcpy(&bytes, from + d, kLanes);
      const Floats code = __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats);
      const Floats value = decoded<bits>(code, scale, bias) * job.factor;
      memcpy(to + d, &value, sizeof value);
    }
    if (d < dim) {
      Floats code = {};
      for (int64_t i = 0; d + i < dim; ++i) code[i] = from[d + i];
      const Floats value = decoded<bits>(code, scale, bias) * job.factor;
      memcpy(to + d, &value, (dim - d) * 4);
    }
    if (bits == 8) {  // as FBGEMM: values beyond the last whole eight lanes go through double
      for (d = dim & ~int64_t{7}; d < dim; ++d) {
        to[d] = float(from[d] * double(scale) + double(bias)) * job.factor;
      }
    }
    if (job.value == Value::fp32) continue;
    uint16_t* narrow = static_cast<uint16_t*>(job.out) + at;
    for (d = 0; d < dim; ++d) {
      narrow[d] = job.value == Value::fp16 ? to_half(to[d]) : to_bfloat16(to[d]);
    }
  }
}

void decode(const DecodeJob& job, int64_t begin, int64_t end) {
  switch (job.bits) {
    case 8: return decode_rows<8>(job, begin, end);
    case 4: return decode_rows<4>(job, begin, end);
    case 3: return decode_rows<3>(job, begin, end);
    default: return decode_rows<2>(job, begin, end);
  }
}

}  // namespace

constexpr Kernels kernels = {encode, decode};

}  // namespace CHECKNRUN_NAMESPACE
}  // namespace checknrun

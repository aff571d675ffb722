// Rows to codes and back, CHECKNRUN_LANES rows at a time: a lane is a row, so that the range search
// needs no horizontal sums. Included once for each instruction set; all builds give the same bytes:
// every operation is one IEEE operation per lane, in the same order, and the compiler may not
// contract them (-ffp-contract=off).
#include "rows_headers.h"

namespace checknrun {
namespace CHECKNRUN_NAMESPACE {
namespace {

constexpr int kLanes = CHECKNRUN_LANES;
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

// Plain memory: a std::vector's functions would be shared with code for lesser machines.
template <typename T>
struct Buffer {
  explicit Buffer(int64_t size)
      : data(static_cast<T*>(std::aligned_alloc(64, (size * sizeof(T) + 127) / 64 * 64))) {
    if (!data) throw std::bad_alloc();
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data); }
  T* const data;
};

inline Floats all(float x) { return x - Floats{}; }
inline Floats lower(Floats a, Floats b) { return a < b ? a : b; }
inline Floats higher(Floats a, Floats b) { return a > b ? a : b; }
inline Floats choose(Ints mask, Floats yes, Floats no) { return mask ? yes : no; }
inline Floats magnitude(Floats x) { return (Floats)((Ints)x & 0x7fffffff); }

inline Floats load(const float* from) {
  Floats x;
  memcpy(&x, from, sizeof x);
  return x;
}

// a * b + c, rounded once.
inline Floats fused(Floats a, Floats b, Floats c) {
#if CHECKNRUN_LANES == 16
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif CHECKNRUN_LANES == 8
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  for (int i = 0; i < kLanes; ++i) a[i] = std::fma(a[i], b[i], c[i]);
  return a;
#endif
}

// To the nearest integer, halves to even; 0 <= x < 2^22.
inline Floats nearest(Floats x) {
#if CHECKNRUN_LANES == 16
  return (Floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif CHECKNRUN_LANES == 8
  return (Floats)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const float magic = 12582912.f;
  return (x + magic) - magic;
#endif
}

inline uint16_t to_half(float x) {
#ifdef CHECKNRUN_F16C
  return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint16_t sign = (bits >> 16) & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x477ff000) return sign | 0x7c00;  // what rounds to 65536 or more
  if (bits < 0x38800000) {  // subnormal: 0.5f has its last bit where the half has
    float small;
    memcpy(&small, &bits, 4);
    small += 0.5f;
    memcpy(&bits, &small, 4);
    return sign | (bits - 0x3f000000);
  }
  bits += 0xfff + ((bits >> 13) & 1);
  return sign | ((bits - 0x38000000) >> 13);
#endif
}

inline float from_half(uint16_t half) {
#ifdef CHECKNRUN_F16C
  return _cvtsh_ss(half);
#else
  uint32_t bits = (half & 0x7fff) << 13;
  float x;
  if (bits >= 0x0f800000) {  // infinity or NaN
    bits += 0x70000000;
    memcpy(&x, &bits, 4);
  } else {
    memcpy(&x, &bits, 4);
    x *= 5192296858534827628530496329220096.f;  // 2^112: the exponents' biases differ by so much
  }
  memcpy(&bits, &x, 4);
  bits |= uint32_t(half & 0x8000) << 16;
  memcpy(&x, &bits, 4);
  return x;
#endif
}

inline Floats round_to_half(Floats x) {
#if CHECKNRUN_LANES == 16
  return (Floats)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif CHECKNRUN_LANES == 8
  return (Floats)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes; ++i) x[i] = from_half(to_half(x[i]));
  return x;
#endif
}

// The bytes of `count` rows from `begin`, as floats; rows of other types go through `scratch`.
inline void find_rows(const EncodeJob& job, int64_t begin, int count, float* scratch,
                      const float** rows) {
  const bool as_is = job.value == Value::fp32 && job.factor == 1.f;
  for (int i = 0; i < count; ++i) {
    const int64_t id = job.ids ? job.ids[begin + i] : begin + i;
    const int64_t at = id * job.row_stride;
    if (as_is) {
      rows[i] = static_cast<const float*>(job.rows) + at;
      continue;
    }
    float* row = scratch + i * job.dim;
    if (job.value == Value::fp32) {
      memcpy(row, static_cast<const float*>(job.rows) + at, job.dim * 4);
    } else {
      const uint16_t* from = static_cast<const uint16_t*>(job.rows) + at;
      for (int64_t d = 0; d < job.dim; ++d) {
        const uint32_t bits = uint32_t(from[d]) << 16;
        if (job.value == Value::fp16) row[d] = from_half(from[d]);
        else memcpy(row + d, &bits, 4);
      }
    }
    for (int64_t d = 0; d < job.dim; ++d) row[d] *= job.factor;
    rows[i] = row;
  }
}

inline void prefetch_rows(const EncodeJob& job, int64_t begin, int64_t end) {
  const int64_t size = job.value == Value::fp32 ? 4 : 2;
  for (int64_t r = begin; r < end; ++r) {
    const char* row = static_cast<const char*>(job.rows) + job.ids[r] * job.row_stride * size;
    for (int64_t at = 0; at < job.dim * size; at += 64) __builtin_prefetch(row + at);
  }
}

template <int... I>
inline Floats shuffle(Floats a, Floats b) {
  return __builtin_shufflevector(a, b, I...);
}

inline Floats interleave_low(Floats a, Floats b) {
#if CHECKNRUN_LANES == 16
  return shuffle<0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23>(a, b);
#elif CHECKNRUN_LANES == 8
  return shuffle<0, 8, 1, 9, 2, 10, 3, 11>(a, b);
#else
  return shuffle<0, 4, 1, 5>(a, b);
#endif
}

inline Floats interleave_high(Floats a, Floats b) {
#if CHECKNRUN_LANES == 16
  return shuffle<8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31>(a, b);
#elif CHECKNRUN_LANES == 8
  return shuffle<4, 12, 5, 13, 6, 14, 7, 15>(a, b);
#else
  return shuffle<2, 6, 3, 7>(a, b);
#endif
}

// columns[d] = element d of every row. `columns` has room for the dim rounded up to the lanes.
inline void transpose(const float* const* rows, int64_t dim, Floats* columns) {
  for (int64_t d = 0; d < dim; d += kLanes) {
    Floats r[kLanes], t[kLanes];
    if (d + kLanes <= dim) {
      for (int i = 0; i < kLanes; ++i) r[i] = load(rows[i] + d);
    } else {
      for (int i = 0; i < kLanes; ++i) {
        r[i] = Floats{};
        memcpy(&r[i], rows[i] + d, (dim - d) * 4);
      }
    }
    for (int width = 1; width < kLanes; width *= 2) {
      for (int i = 0; i < kLanes / 2; ++i) {
        t[2 * i] = interleave_low(r[i], r[i + kLanes / 2]);
        t[2 * i + 1] = interleave_high(r[i], r[i + kLanes / 2]);
      }
      for (int i = 0; i < kLanes; ++i) r[i] = t[i];
    }
    for (int i = 0; i < kLanes; ++i) columns[d + i] = r[i];
  }
}

struct Grid {
  Floats bias, scale;
};

// Squared errors of N grids (bias, scale), in units of the values; for ranking only: as if bias and
// scale were stored as they are.
template <int N>
inline void grid_errors(const Floats* x, int64_t dim, const Floats* bias, const Floats* scale,
                        Floats top, Floats* error) {
  Floats inverse[N], offset[N], even[N], odd[N];
  for (int c = 0; c < N; ++c) {
    inverse[c] = choose(scale[c] > 0, 1.f / scale[c], all(1.f));
    offset[c] = -bias[c] * inverse[c];
    even[c] = odd[c] = Floats{};
  }
  int64_t d = 0;
  for (; d + 1 < dim; d += 2) {
    for (int c = 0; c < N; ++c) {
      const Floats t = x[d] * inverse[c] + offset[c];
      const Floats u = x[d + 1] * inverse[c] + offset[c];
      const Floats e = t - nearest(lower(higher(t, Floats{}), top));
      const Floats f = u - nearest(lower(higher(u, Floats{}), top));
      even[c] += e * e;
      odd[c] += f * f;
    }
  }
  if (d < dim) {
    for (int c = 0; c < N; ++c) {
      const Floats t = x[d] * inverse[c] + offset[c];
      const Floats e = t - nearest(lower(higher(t, Floats{}), top));
      even[c] += e * e;
    }
  }
  for (int c = 0; c < N; ++c) error[c] = (even[c] + odd[c]) * scale[c] * scale[c];
}

inline Grid greedy_search(const Floats* x, int64_t dim, Floats low, Floats high, Floats top,
                          int num_bins, float ratio) {
  const Floats step = (high - low) / float(num_bins);
  Grid best{low, (high - low) / top};
  Floats least;
  grid_errors<1>(x, dim, &best.bias, &best.scale, top, &least);
  const int moves = int(ratio * float(num_bins));
  for (int move = 0; move < moves; ++move) {
    const Floats scale = (high - low - step) / top;
    const Floats bias[2] = {low + step, low}, scales[2] = {scale, scale};
    Floats error[2];
    grid_errors<2>(x, dim, bias, scales, top, error);
    const Ints raise = error[0] < error[1];
    low = choose(raise, low + step, low);
    high = choose(raise, high, high - step);
    const Floats smaller = lower(error[0], error[1]);
    const Ints better = (smaller < least) & (scale > 0);
    least = choose(better, smaller, least);
    best = {choose(better, low, best.bias), choose(better, scale, best.scale)};
  }
  return best;
}

// The squared error of a grid exactly as it will be encoded and decoded.
inline Floats stored_error(const Floats* x, int64_t dim, Grid grid, Floats top) {
  const Floats inverse = 1.f / grid.scale;
  Floats error[2] = {};
  for (int64_t d = 0; d < dim; ++d) {
    const Floats t = (x[d] - grid.bias) * inverse;
    const Floats code = nearest(lower(higher(t, Floats{}), top));
    const Floats e = x[d] - (code * grid.scale + grid.bias);
    error[d & 1] += e * e;
  }
  return error[0] + error[1];
}

// Of N grids, each first replaced by the one that fits its codes best (least squares), the best so
// far. `x` has mean zero; `gain` is by how much a grid's squared error is below that of no grid.
template <int N>
inline void fit_best(const Floats* x, int64_t dim, const Grid* grids, Floats top, Grid& best,
                     Floats& gain) {
  Floats inverse[N], offset[N], sum[N], squares[N], products[N];
  for (int c = 0; c < N; ++c) {
    inverse[c] = 1.f / grids[c].scale;
    offset[c] = -grids[c].bias * inverse[c];
    sum[c] = squares[c] = products[c] = Floats{};
  }
  for (int64_t d = 0; d < dim; ++d) {
    for (int c = 0; c < N; ++c) {
      const Floats t = x[d] * inverse[c] + offset[c];
      const Floats code = nearest(lower(higher(t, Floats{}), top));
      sum[c] += code;
      squares[c] += code * code;
      products[c] += code * x[d];
    }
  }
  for (int c = 0; c < N; ++c) {
    const Floats mean = sum[c] / float(dim);
    const Floats variance = squares[c] - sum[c] * mean;
    const Floats scale = products[c] / variance;
    const Floats gained = products[c] * scale;
    const Ints better = (variance > 1e-3f) & (scale > 0) & (gained > gain);
    gain = choose(better, gained, gain);
    best = {choose(better, -scale * mean, best.bias), choose(better, scale, best.scale)};
  }
}

// Ours: starts from a cut range, then moves either end by a part of a step, twice.
inline Grid range_search(const Floats* x, int64_t dim, Floats low, Floats high, Floats top,
                         int bits) {
  static const float cuts[5] = {0, 0, .18f, .08f, .02f};
  const Floats range = high - low;
  const float cut = cuts[bits];
  Grid best{low + cut * range, range * (1.f - 2.f * cut) / top};
  Floats gain = {};
  const Grid start = best;
  fit_best<1>(x, dim, &start, top, best, gain);
  for (const float move : {.4f, .2f}) {
    const Floats by = move * best.scale, wider = best.scale + by / top,
                 narrower = best.scale - by / top;
    const Grid moved[4] = {{best.bias + by, narrower},
                           {best.bias - by, wider},
                           {best.bias, wider},
                           {best.bias, narrower}};
    fit_best<4>(x, dim, moved, top, best, gain);
  }
  return best;
}

// FBGEMM's own grid, to the bit.
inline Grid min_max_grid(Floats low, Floats high, Floats top) {
  const Floats bias = round_to_half(low);
  const Floats range = high - bias;
  Floats scale = round_to_half(choose(range == 0, all(1.f), range / top));
  scale = choose(scale == 0, all(1.f), scale);
  return {bias, scale};
}

inline Grid min_max_grid8(Floats low, Floats high) { return {low, (high - low) / 255.f}; }

// -scale * top / 2 is the bias: exact, because the scale keeps so many bits fewer; so a decoded row
// is encoded to the same again. Zero lies between two codes, but a row of nothing else stays zero.
inline Grid symmetric_grid(Floats low, Floats high, Floats top, int bits) {
  const Floats most = higher(magnitude(low), magnitude(high));
  Floats scale = 2.f * most / top;
  const int dropped = bits == 8 ? 8 : 13 + bits;
  const Ints half = ((Ints)scale >> dropped & 1) + ((1 << (dropped - 1)) - 1);
  scale = (Floats)(((Ints)scale + half) & -(1 << dropped));
  if (bits < 8) {
    const Floats coarser = (scale + 1.5f) - 1.5f;  // of a subnormal half only these can be halved
    scale = round_to_half(choose(scale < 6.103515625e-5f, coarser, scale));
  }
  const Ints zero = scale == 0;
  return {choose(zero, Floats{}, -(scale * (top * 0.5f))), choose(zero, all(1.f), scale)};
}

inline Grid find_grid(const EncodeJob& job, const Floats* x, Floats* centred, Floats low,
                      Floats high, Floats mean) {
  const Floats top = all(float((1 << job.bits) - 1));
  if (job.method == Method::symmetric) return symmetric_grid(low, high, top, job.bits);
  if (job.bits == 8) return min_max_grid8(low, high);
  const Grid plain = min_max_grid(low, high, top);
  if (job.method == Method::asymmetric) return plain;
  Grid found;
  if (job.method == Method::greedy) {
    found = greedy_search(x, job.dim, low, high, top, job.num_bins, job.ratio);
  } else {
    for (int64_t d = 0; d < job.dim; ++d) centred[d] = x[d] - mean;
    found = range_search(centred, job.dim, low - mean, high - mean, top, job.bits);
    found.bias += mean;
  }
  const Floats scale = round_to_half(found.scale);
  const Ints usable = scale > 0;
  found = {round_to_half(found.bias), choose(usable, scale, all(1.f))};
  // Both end codes must be in use: then a decoded row's own extremes give the same grid again.
  const Floats inverse = 1.f / found.scale;
  const Ints reached =
      ((low - found.bias) * inverse < 0.5f) & ((high - found.bias) * inverse > top - 0.5f);
  const Floats error = stored_error(x, job.dim, found, top);
  const Floats plain_error = stored_error(x, job.dim, plain, top);
  const Ints better = usable & reached & (error < plain_error * 0.99999f);
  return {choose(better, found.bias, plain.bias), choose(better, found.scale, plain.scale)};
}

// Eight codes, a byte each, to `bits` bytes: the first code in the lowest bits.
inline uint64_t pack8(uint64_t codes, int bits) {
#ifdef CHECKNRUN_PEXT
  return _pext_u64(codes, 0x0101010101010101ull * ((1u << bits) - 1));
#else
  const int gap = 8 - bits;
  const uint64_t pair = (1u << 2 * bits) - 1, quad = (1u << 4 * bits) - 1;
  codes |= codes >> gap;
  codes &= pair | pair << 16 | pair << 32 | pair << 48;
  codes |= codes >> 2 * gap;
  codes &= quad | quad << 32;
  codes |= codes >> 4 * gap;
  return codes & ((1ull << 8 * bits) - 1);
#endif
}

inline uint64_t unpack8(uint64_t packed, int bits) {
#ifdef CHECKNRUN_PEXT
  return _pdep_u64(packed, 0x0101010101010101ull * ((1u << bits) - 1));
#else
  const int gap = 8 - bits;
  const uint64_t one = (1u << bits) - 1, pair = (1u << 2 * bits) - 1, quad = (1u << 4 * bits) - 1;
  packed = (packed | packed << 4 * gap) & (quad | quad << 32);
  packed = (packed | packed << 2 * gap) & (pair | pair << 16 | pair << 32 | pair << 48);
  return (packed | packed << gap) & (one * 0x0101010101010101ull);
#endif
}

inline Bytes codes_of(Floats x, float bias, float inverse, Floats top) {
  const Floats t = (x - bias) * inverse;
  return __builtin_convertvector(
      __builtin_convertvector(nearest(lower(higher(t, Floats{}), top)), Ints), Bytes);
}

template <int bits>
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
  if (bits == 8) {
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
// By bits: below this range the largest value may get a lower code than the last one, and another
// one at every pass, because the scale is rounded to fp16 (at 8 bit: because FBGEMM adds 1e-8 to the
// range). Beside values that are not small that is nothing.
constexpr float kLeastRange[9] = {0, 0, 6e-7f, 3.2e-6f, 1.5e-5f, 0, 0, 0, 5.5e-6f};
constexpr float kSmall = 0.015625f;

inline bool all_finite(const float* row, int64_t dim) {
  for (int64_t d = 0; d < dim; ++d) {
    if (!std::isfinite(row[d])) return false;
  }
  return true;
}

// `low` and `high` are a row's extremes; they say nothing where a value lies outside the limits.
inline uint8_t refusal(const EncodeJob& job, const float* row, bool outside, float low,
                       float high) {
  if (outside) return all_finite(row, job.dim) ? too_large : not_finite;
  const float most = std::max(std::fabs(low), std::fabs(high));
  if (most > 0 && most < kLeast) return too_small;
  const float range = high - low;
  const bool drifts = range > 0 && range < kLeastRange[job.bits] && most < kSmall;
  return drifts ? too_small : encoded;
}

// Which of its zeros FBGEMM takes for a row's minimum of zero, since the bias keeps its sign: of
// eight lanes the first that has one, the last one there.
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

// Rows one after another, for methods that need nothing but a row's extremes; their grids together.
inline int64_t encode_by_row(const EncodeJob& job, int64_t begin, int64_t end) {
  const int64_t dim = job.dim;
  const Buffer<float> scratch(job.value == Value::fp32 && job.factor == 1.f ? 0 : kLanes * dim);
  const float limit = job.bits == 8 ? kMostFloat : kMostHalf;
  int64_t refusals = 0;
  for (int64_t r = begin; r < end; r += kLanes) {
    const int count = int(std::min<int64_t>(kLanes, end - r));
    if (job.ids) prefetch_rows(job, std::min(r + kLanes, end), std::min(r + 2 * kLanes, end));
    const float* rows[kLanes];
    find_rows(job, r, count, scratch.data, rows);
    Floats low = {}, high = {}, poison = {};  // NaN, once there was one or an infinity
    for (int i = 0; i < count; ++i) {
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

// Rows side by side in lanes.
inline int64_t encode_by_lane(const EncodeJob& job, int64_t begin, int64_t end) {
  const int64_t dim = job.dim, padded = (dim + kLanes - 1) / kLanes * kLanes;
  const Buffer<float> scratch(job.value == Value::fp32 && job.factor == 1.f ? 0 : kLanes * dim);
  const Buffer<Floats> columns(2 * padded);
  Floats* x = columns.data;
  const Floats limit = all(job.bits == 8 ? kMostFloat : kMostHalf);
  int64_t refusals = 0;
  for (int64_t r = begin; r < end; r += kLanes) {
    const int count = int(std::min<int64_t>(kLanes, end - r));
    if (job.ids) prefetch_rows(job, std::min(r + 2 * kLanes, end), std::min(r + 3 * kLanes, end));
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

// With a scale in fp16 the product of up to four bits is exact, however it is added.
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
    const uint8_t* row = job.data + r * job.row_bytes;
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
    if (bits == 8) {  // as FBGEMM: what doesn't fill eight lanes goes through double
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

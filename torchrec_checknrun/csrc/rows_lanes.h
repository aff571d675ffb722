// Vectors of CHECKNRUN_LANES lanes, and rows into them: included once for each instruction set, all
// with the same results (every operation is one IEEE operation per lane).
namespace checknrun {
namespace CHECKNRUN_NAMESPACE {
namespace {

constexpr int kLanes = CHECKNRUN_LANES;
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

// Plain memory: a std::vector's functions would be shared with code for older machines.
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

// Rounds to the nearest integer, ties to even; 0 <= x < 2^22.
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
  if (bits >= 0x477ff000) return sign | 0x7c00;  // rounds to 65536 or more
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

// Returns `count` rows from `begin` as floats; rows of other types go through `scratch`.
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

inline void prefetch_row(const EncodeJob& job, int64_t r) {
  const int64_t size = job.value == Value::fp32 ? 4 : 2;
  const char* row = static_cast<const char*>(job.rows) + job.ids[r] * job.row_stride * size;
  for (int64_t at = 0; at < job.dim * size; at += 64) __builtin_prefetch(row + at);
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

// Sets columns[d] to element d of every row. `columns` has room for dim rounded up to the lanes.
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

}  // namespace
}  // namespace CHECKNRUN_NAMESPACE
}  // namespace checknrun

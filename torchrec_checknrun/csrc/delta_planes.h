// Vectors of integers, and a row's zigzag codes to planes of bits and back. Included once for each
// instruction set.
namespace checknrun {
namespace CHECKNRUN_NAMESPACE {
namespace {

constexpr int kStep = kLanes < 8 ? 8 : kLanes;  // codes that are packed at a time

// Returns dim rounded up to whole steps.
inline int64_t padded(int64_t dim) { return (dim + kStep - 1) / kStep * kStep; }

inline Ints load_ints(const int32_t* from) {
  Ints x;
  memcpy(&x, from, sizeof x);
  return x;
}

// Loads up to kLanes values; the other lanes are zero.
template <typename V, typename T>
inline V load_part(const T* from, int64_t count) {
  V x = {};
  if (count >= kLanes) memcpy(&x, from, sizeof x);
  else memcpy(&x, from, count * sizeof(T));
  return x;
}

template <typename V, typename T>
inline void store_part(T* to, V x, int64_t count) {
  if (count >= kLanes) memcpy(to, &x, sizeof x);
  else memcpy(to, &x, count * sizeof(T));
}

inline Ints larger(Ints a, Ints b) { return a > b ? a : b; }
inline Ints magnitudes(Ints x) { return (x ^ (x >> 31)) - (x >> 31); }
inline Ints zigzag(Ints x) { return (x << 1) ^ (x >> 31); }
inline Ints unzigzag(Ints z) { return ((z >> 1) & 0x7fffffff) ^ -(z & 1); }

inline int32_t largest(Ints x) {
#if CHECKNRUN_LANES == 16
  return _mm512_reduce_max_epi32((__m512i)x);
#elif CHECKNRUN_LANES == 8
  const __m256i all = (__m256i)x;
  __m128i most = _mm_max_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
  most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1));
  return _mm_cvtsi128_si32(most);
#else
  int32_t most = x[0];
  for (int i = 1; i < kLanes; ++i) most = x[i] > most ? x[i] : most;
  return most;
#endif
}

// Returns the nearest integers, ties to even; |x| < 2^24.
inline Ints nearest_ints(Floats x) {
#if CHECKNRUN_LANES == 16
  return (Ints)_mm512_cvt_roundps_epi32((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif CHECKNRUN_LANES == 8
  return __builtin_convertvector(nearest(x), Ints);
#else
  const Floats shift = (Floats)(((Ints)x & INT32_MIN) | 0x4b000000);  // 2^23 with the sign of x
  const Floats rounded = magnitude(x) < all(8388608.f) ? (x + shift) - shift : x;
  return __builtin_convertvector(rounded, Ints);
#endif
}

inline uint8_t* append(Stream& stream, int64_t bytes) {
  if (stream.room - stream.size < bytes + kSlack) grow(stream, bytes + kSlack);
  uint8_t* at = stream.data + stream.size;
  stream.size += bytes;
  return at;
}

// Widen and narrow whole vectors of codes, which compilers take apart, lane by lane.
inline Ints widened(const uint8_t* from) {
#if CHECKNRUN_LANES == 16
  return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif CHECKNRUN_LANES == 8
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  Bytes bytes;
  memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, Ints);
#endif
}

// As above, of a vector's part of kStep codes; not by way of memory, where it would have to wait.
inline Ints widened(const uint64_t* eights, int part) {
#if CHECKNRUN_LANES == 16
  return (Ints)_mm512_cvtepu8_epi32(_mm_set_epi64x(int64_t(eights[1]), int64_t(eights[0])));
#elif CHECKNRUN_LANES == 8
  return (Ints)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(int64_t(eights[0])));
#else
  return widened(reinterpret_cast<const uint8_t*>(eights) + part);
#endif
}

inline void narrow(Ints x, uint8_t* to) {  // keeps the low bytes
#if CHECKNRUN_LANES == 16
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)x));
#elif CHECKNRUN_LANES == 8
  const __m256i low = _mm256_shuffle_epi8((__m256i)x, _mm256_set1_epi32(0x0c080400));
  const __m128i bytes =
      _mm_unpacklo_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), bytes);
#else
  const Bytes bytes = __builtin_convertvector(x, Bytes);
  memcpy(to, &bytes, sizeof bytes);
#endif
}

// Writes a plane of zigzag codes; `z` is padded with zeros. May write kSlack bytes too many.
template <int width>
inline void pack_row(const int32_t* z, int64_t dim, int low, int32_t mask, uint8_t* out) {
  uint64_t eights[kStep / 8];
  for (int64_t d = 0; d < dim; d += kStep) {
    for (int i = 0; i < kStep; i += kLanes) {
      const Ints part = (load_ints(z + d + i) >> low) & mask;
      narrow(part, reinterpret_cast<uint8_t*>(eights) + i);
    }
    for (const uint64_t eight : eights) {
      const uint64_t packed = width == 8 ? eight : pack8(eight, width);
      memcpy(out, &packed, 8);
      out += width;
    }
  }
}

// Adds a plane to zigzag codes, or begins them. May read kSlack bytes too many.
template <int width, bool begins>
inline void unpack_row(const uint8_t* from, int64_t dim, int low, int32_t mask, int32_t* z) {
  uint64_t eights[kStep / 8];
  for (int64_t d = 0; d < dim; d += kStep) {
    for (uint64_t& eight : eights) {
      memcpy(&eight, from, 8);
      if (width < 8) eight = unpack8(eight & ((1ull << 8 * (width & 7)) - 1), width);
      from += width;
    }
    for (int i = 0; i < kStep; i += kLanes) {
      Ints part = (widened(eights, i) & mask) << low;
      if (!begins) part |= load_ints(z + d + i);
      memcpy(z + d + i, &part, sizeof part);
    }
  }
}

}  // namespace
}  // namespace CHECKNRUN_NAMESPACE
}  // namespace checknrun

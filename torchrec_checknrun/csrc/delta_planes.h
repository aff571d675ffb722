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

// Writes a plane of zigzag codes; `z` is padded with zeros. May write kSlack bytes too many.
template <int width>
inline void pack_row(const int32_t* z, int64_t dim, int low, int32_t mask, uint8_t* out) {
  uint64_t eights[kStep / 8];
  for (int64_t d = 0; d < dim; d += kStep) {
    for (int i = 0; i < kStep; i += kLanes) {
      const Ints part = (load_ints(z + d + i) >> low) & mask;
      const Bytes bytes = __builtin_convertvector(part, Bytes);
      memcpy(reinterpret_cast<uint8_t*>(eights) + i, &bytes, sizeof bytes);
    }
    for (const uint64_t eight : eights) {
      const uint64_t packed = width == 8 ? eight : pack8(eight, width);
      memcpy(out, &packed, 8);
      out += width;
    }
  }
}

inline void pack_row(const int32_t* z, int64_t dim, Plane plane, uint8_t* out) {
  const int32_t mask = (1 << plane.bits) - 1;
  switch (plane.width) {
    case 8: return pack_row<8>(z, dim, plane.low, mask, out);
    case 4: return pack_row<4>(z, dim, plane.low, mask, out);
    case 2: return pack_row<2>(z, dim, plane.low, mask, out);
    default: return pack_row<1>(z, dim, plane.low, mask, out);
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
      Bytes bytes;
      memcpy(&bytes, reinterpret_cast<const uint8_t*>(eights) + i, sizeof bytes);
      Ints part = (__builtin_convertvector(bytes, Ints) & mask) << low;
      if (!begins) part |= load_ints(z + d + i);
      memcpy(z + d + i, &part, sizeof part);
    }
  }
}

inline void unpack_row(const uint8_t* from, int64_t dim, Plane plane, bool begins, int32_t* z) {
  const int32_t mask = (1 << plane.bits) - 1;
  const int low = plane.low;
  if (begins) {
    switch (plane.width) {
      case 8: return unpack_row<8, true>(from, dim, low, mask, z);
      case 4: return unpack_row<4, true>(from, dim, low, mask, z);
      default: return unpack_row<2, true>(from, dim, low, mask, z);
    }
  }
  switch (plane.width) {
    case 8: return unpack_row<8, false>(from, dim, low, mask, z);
    case 4: return unpack_row<4, false>(from, dim, low, mask, z);
    case 2: return unpack_row<2, false>(from, dim, low, mask, z);
    default: return unpack_row<1, false>(from, dim, low, mask, z);
  }
}

}  // namespace
}  // namespace CHECKNRUN_NAMESPACE
}  // namespace checknrun

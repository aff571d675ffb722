// Encodes rows upon what their shard holds, and replaces that, a batch of rows at a time:
// everything about a row is done while it is in the nearest cache. Included once for each
// instruction set, after delta_kernel.h's functions.
namespace checknrun {
namespace CHECKNRUN_NAMESPACE {
namespace {

template <typename To, typename From>
inline void convert(To* to, const From* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<To>(from[i]);
}

// By whole vectors, since the row is loaded in such next, which has to wait for smaller stores.
inline void widen(int32_t* to, const uint8_t* slot, int64_t dim) {
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) {
    const Ints codes = widened(slot + d) << 24 >> 24;
    memcpy(to + d, &codes, sizeof codes);
  }
  convert(to + d, reinterpret_cast<const int8_t*>(slot) + d, dim - d);
}

inline void narrow(uint8_t* slot, const int32_t* codes, int64_t dim) {
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) narrow(load_ints(codes + d), slot + d);
  convert(slot + d, codes + d, dim - d);
}

inline uint64_t word_of(const uint8_t* slot) {
  uint64_t word;
  memcpy(&word, slot, 8);
  return word;
}

// Returns the sum of the codes, as unsigned numbers, times their columns' factors. Codes are padded
// by anything, since the factors there are 0.
inline uint64_t weighed(const DeltaLinkJob& job, const int32_t* codes) {
#if CHECKNRUN_LANES >= 8  // there is a product of 32 bits each to 64, none of 64 to 64
  typedef uint64_t Wide __attribute__((vector_size(4 * kLanes)));
  typedef uint32_t Unsigned __attribute__((vector_size(4 * kLanes)));
  Wide lower = {};
  Unsigned upper = {};
  for (int64_t d = 0; d < job.dim; d += kLanes) {
    const Wide x = (Wide)load_ints(codes + d), low = (Wide)load_ints(job.low + d);
#if CHECKNRUN_LANES == 16
    lower += (Wide)_mm512_mul_epu32((__m512i)x, (__m512i)low);
    lower += (Wide)_mm512_mul_epu32((__m512i)(x >> 32), (__m512i)(low >> 32));
#else
    lower += (Wide)_mm256_mul_epu32((__m256i)x, (__m256i)low);
    lower += (Wide)_mm256_mul_epu32((__m256i)(x >> 32), (__m256i)(low >> 32));
#endif
    upper += (Unsigned)x * (Unsigned)load_ints(job.high + d);
  }
  lower += ((Wide)upper << 32) + ((Wide)upper & ~uint64_t(UINT32_MAX));
#if CHECKNRUN_LANES == 16
  return uint64_t(_mm512_reduce_add_epi64((__m512i)lower));
#else
  const __m128i half = _mm_add_epi64(_mm256_castsi256_si128((__m256i)lower),
                                     _mm256_extracti128_si256((__m256i)lower, 1));
  return uint64_t(_mm_cvtsi128_si64(half)) + uint64_t(_mm_extract_epi64(half, 1));
#endif
#else
  uint64_t sum = 0;
  for (int64_t j = 0; j < job.dim; ++j) {
    const uint64_t factor = uint32_t(job.low[j]) | uint64_t(uint32_t(job.high[j])) << 32;
    sum += uint64_t(uint32_t(codes[j])) * factor;
  }
  return sum;
#endif
}

inline uint64_t digest_of(const DeltaLinkJob& job, int64_t at, uint8_t kind, int exponent,
                          const int32_t* codes) {
  uint64_t place = mixed(uint64_t(at + job.row_start) ^ job.first) ^ job.last;
  place = mixed(place ^ uint64_t(kind) << 32 ^ uint64_t(int64_t(exponent) + 1024));
  return mixed(place + weighed(job, codes));
}

// Copies a row to the record of old ones, and its grid to row i of `before`; returns its digest.
inline uint64_t take(const DeltaLinkJob& job, int64_t r, int64_t i, const GridRows& before,
                     DeltaLinkPart& out, bool& sound) {
  const int64_t at = job.positions[r], dim = job.dim;
  const HeldRows& held = job.held;
  const uint8_t* slot = held.slots + at * held.slot;
  const uint8_t form = held.forms[at];
  job.old.forms[r] = form;
  job.old.exponents[r] = held.exponents[at];
  memcpy(job.old.slots + r * held.slot, slot, held.slot);
  const uint64_t word = word_of(slot);
  int32_t* base = before.codes + i * dim;
  before.kind[i] = form == kFormNone ? kNone : form == kDigest ? kVerbatim : kGrid;
  before.exponent[i] = before.kind[i] == kGrid ? int16_t(held.exponents[at] - kFormBias) : 0;
  if (form == kBytes) {
    widen(base, slot, dim);
  } else if (form == kShort && word < uint64_t(held.short_rows)) {
    memcpy(job.old.shorts + out.short_at++ * dim, held.shorts + word * dim, dim * 2);
    convert(base, held.shorts + word * dim, dim);
  } else if (form == kLong && word < uint64_t(held.long_rows)) {
    memcpy(job.old.longs + out.long_at++ * dim, held.longs + word * dim, dim * 4);
    memcpy(base, held.longs + word * dim, dim * 4);
  } else if (form != kFormNone) {
    sound &= form == kDigest;
    return word;
  } else {
    return 0;
  }
  return digest_of(job, at, kGrid, before.exponent[i], base);
}

// Replaces a row by row i of `after`; returns that one's digest.
inline uint64_t put(const DeltaLinkJob& job, int64_t r, int64_t i, const GridRows& after,
                    DeltaLinkPart& out) {
  const int64_t at = job.positions[r], dim = job.dim;
  const HeldRows& held = job.held;
  uint8_t* slot = held.slots + at * held.slot;
  const uint8_t before = held.forms[at];
  const uint64_t word = word_of(slot);
  const int32_t* codes = after.codes + i * dim;
  const uint64_t digest = digest_of(job, at, after.kind[i], after.exponent[i], codes);
  uint8_t form = kDigest;
  if (after.kind[i] == kGrid) {
    const int32_t most = largest_magnitude(codes, dim);
    form = most < 128 ? kBytes : most < 32768 ? kShort : kLong;
  }
  if (form != before && (before == kShort || before == kLong)) {
    memcpy(append(out.freed[before == kLong], 8), &word, 8);
  }
  if (form == kBytes) {
    narrow(slot, codes, dim);
  } else if (form == kDigest) {
    memcpy(slot, &digest, 8);
  } else if (form != before) {
    memcpy(append(out.moved, 8), &r, 8);
    memcpy(append(out.moved_codes, dim * 4), codes, dim * 4);
    form = kFormNone;  // until it has a place
  } else if (form == kShort) {
    convert(held.shorts + word * dim, codes, dim);
  } else {
    memcpy(held.longs + word * dim, codes, dim * 4);
  }
  held.forms[at] = form;
  held.exponents[at] = after.kind[i] == kGrid ? uint8_t(after.exponent[i] + kFormBias) : 0;
  return digest;
}

DeltaFault link(const DeltaLinkJob& job, int64_t begin, int64_t end, DeltaLinkPart& out) {
  Batch batch(job.dim);
  const Buffer<int32_t> base(batch.most * job.dim + kStep), codes(batch.most * job.dim + kStep);
  const Buffer<float> scratch(job.dim);
  uint8_t base_kinds[kMostBatch], kinds[kMostBatch];
  int16_t base_exponents[kMostBatch], exponents[kMostBatch];
  DeltaEncodeJob some{job.weight,
                      job.value,
                      job.stride,
                      job.dim,
                      nullptr,
                      {base_kinds, base_exponents, base.data},
                      {kinds, exponents, codes.data},
                      nullptr};
  for (int64_t start = begin; start < end; start += batch.most) {
    const int64_t n = std::min(batch.most, end - start);
    some.wanted = job.wanted + start;
    some.symbols = job.symbols + start;
    for (int64_t i = 0; i < n; ++i) {
      bool sound = true;
      out.before += take(job, start + i, i, some.before, out, sound);
      ++out.done;
      if (!sound) return kNoPredecessor;
      if (base_kinds[i] == kGrid && some.wanted[i] >= base_exponents[i] + job.reset) {
        base_kinds[i] = kNone;
      }
      const int drop = settle(some, i, row_of(some, start + i, scratch.data));
      const DeltaFault fault = add_row(some, i, drop, i, batch, out.streams);
      if (fault != kSound) return fault;
    }
    write_planes(batch, n, out.streams);
    for (int64_t i = 0; i < n; ++i) out.after += put(job, start + i, i, some.after, out);
  }
  return kSound;
}

}  // namespace
}  // namespace CHECKNRUN_NAMESPACE
}  // namespace checknrun

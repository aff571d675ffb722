// Encodes rows upon what their shard holds, and replaces that, row by row: everything about a row is
// done while it is in the nearest cache. Included once for each instruction set, after
// delta_kernel.h's functions.
namespace checknrun {
namespace CHECKNRUN_NAMESPACE {
namespace {

template <typename To, typename From>
inline void convert(To* to, const From* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<To>(from[i]);
}

inline uint64_t word_of(const uint8_t* slot) {
  uint64_t word;
  memcpy(&word, slot, 8);
  return word;
}

// Returns the sum of the codes, as unsigned numbers, times their columns' factors. Codes are padded
// by anything, since the factors there are 0.
inline uint64_t weighed(const DeltaLinkJob& job, const int32_t* codes) {
  uint64_t sum = 0;
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
  uint32_t high = 0;
  for (int i = 0; i < kLanes; ++i) high += upper[i];
  for (int i = 0; i < kLanes / 2; ++i) sum += lower[i];
  return sum + (uint64_t(high) << 32);
#else
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

// A row's predecessor and its successor, as the kernel that encodes takes them.
struct OneRow {
  uint8_t base_kind = kNone, kind = kNone;
  int16_t base_exponent = 0, exponent = 0;
};

// Copies a row to the record of old ones, and its codes to `base`; returns its digest.
inline uint64_t take(const DeltaLinkJob& job, int64_t r, OneRow& row, int32_t* base,
                     DeltaLinkPart& out, bool& sound) {
  const int64_t at = job.positions[r], dim = job.dim;
  const HeldRows& held = job.held;
  const uint8_t* slot = held.slots + at * held.slot;
  const uint8_t form = held.forms[at];
  job.old.forms[r] = form;
  job.old.exponents[r] = held.exponents[at];
  memcpy(job.old.slots + r * held.slot, slot, held.slot);
  const uint64_t word = word_of(slot);
  row.base_kind = form == kFormNone ? kNone : form == kDigest ? kVerbatim : kGrid;
  row.base_exponent = row.base_kind == kGrid ? held.exponents[at] - kFormBias : 0;
  if (form == kBytes) {
    convert(base, reinterpret_cast<const int8_t*>(slot), dim);
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
  return digest_of(job, at, kGrid, row.base_exponent, base);
}

// Replaces a row by its successor; returns that one's digest.
inline uint64_t put(const DeltaLinkJob& job, int64_t r, const OneRow& row, const int32_t* codes,
                    DeltaLinkPart& out) {
  const int64_t at = job.positions[r], dim = job.dim;
  const HeldRows& held = job.held;
  uint8_t* slot = held.slots + at * held.slot;
  const uint8_t before = held.forms[at];
  const uint64_t word = word_of(slot);
  const uint64_t digest = digest_of(job, at, row.kind, row.exponent, codes);
  uint8_t form = kDigest;
  if (row.kind == kGrid) {
    const int32_t most = largest_magnitude(codes, dim);
    form = most < 128 ? kBytes : most < 32768 ? kShort : kLong;
  }
  if (form != before && (before == kShort || before == kLong)) {
    memcpy(append(out.freed[before == kLong], 8), &word, 8);
  }
  if (form == kBytes) {
    convert(reinterpret_cast<int8_t*>(slot), codes, dim);
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
  held.exponents[at] = row.kind == kGrid ? uint8_t(row.exponent + kFormBias) : 0;
  return digest;
}

DeltaFault link(const DeltaLinkJob& job, int64_t begin, int64_t end, DeltaLinkPart& out) {
  const Buffer<int32_t> z(padded(job.dim)), base(padded(job.dim)), codes(padded(job.dim));
  const Buffer<float> scratch(job.dim);
  memset(z.data, 0, padded(job.dim) * 4);
  OneRow row;
  DeltaEncodeJob one{job.weight,
                     job.value,
                     job.stride,
                     job.dim,
                     nullptr,
                     {&row.base_kind, &row.base_exponent, base.data},
                     {&row.kind, &row.exponent, codes.data},
                     nullptr};
  for (int64_t r = begin; r < end; ++r) {
    bool sound = true;
    out.before += take(job, r, row, base.data, out, sound);
    ++out.done;
    if (!sound) return kNoPredecessor;
    if (row.base_kind == kGrid && job.wanted[r] >= row.base_exponent + job.reset) {
      row.base_kind = kNone;
    }
    one.wanted = job.wanted + r;
    one.symbols = job.symbols + r;
    const int drop = settle(one, 0, row_of(one, r, scratch.data));
    const DeltaFault fault = write_row(one, 0, drop, z.data, out.streams);
    if (fault != kSound) return fault;
    out.after += put(job, r, row, codes.data, out);
  }
  return kSound;
}

}  // namespace
}  // namespace CHECKNRUN_NAMESPACE
}  // namespace checknrun

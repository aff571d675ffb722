// Packs codes, a byte each, into fewer bits. Included once for each instruction set.
namespace checknrun {
namespace CHECKNRUN_NAMESPACE {
namespace {

// Packs eight codes, a byte each, into `bits` bytes, the first code in the lowest bits.
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

// `packed` has no bits beyond the eight codes'.
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

}  // namespace
}  // namespace CHECKNRUN_NAMESPACE
}  // namespace checknrun

// A check of bytes that costs little beside their copy: what changes them by mistake is found.
//
// Eight lanes of 64 bits each add up products of halves of their words, each word under a key of its
// own, so that words that change places are found. No defence against whoever knows it.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace checknrun {

constexpr uint64_t kMix = 0x9E3779B97F4A7C15;  // has no 16 equal bits in a row

class BlockCheck {
 public:
  static constexpr int64_t kBlock = 64;

  explicit BlockCheck(uint64_t seed) {
    for (uint64_t i = 0; i < kLanes; ++i) key_[i] = (seed ^ i) * kMix + i;
  }

  // Adds bytes, of which only the last ones may be no multiple of a block.
  void add(const uint8_t* from, int64_t size) {
    const int64_t whole = add_whole(from, size), rest = size - whole;
    if (rest == 0) return;
    uint8_t last[kBlock] = {};
    std::memcpy(last, from + whole, size_t(rest));
    blocks(last, kBlock);
    size_ += uint64_t(rest);
  }

  // Adds the whole blocks of some bytes; returns how many bytes these are.
  int64_t add_whole(const uint8_t* from, int64_t size) {
    size = size / kBlock * kBlock;
    blocks(from, size);
    size_ += uint64_t(size);
    return size;
  }

  // Copies whole blocks, past the caches where they can be: nobody reads them soon. Adds them.
  void copy(uint8_t* into, const uint8_t* from, int64_t size) {
    passes().copy(into, from, size, lane_, key_);
    size_ += uint64_t(size);
  }

  // Has what was copied in memory before anything that is stored later.
  static void finish_copies() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
  }

  int64_t sum() const {
    // So that zeros alone are not their own check, and no bytes at all have one for each seed.
    uint64_t sum = size_ ^ kMix ^ key_[0];
    for (const uint64_t lane : lane_) {
      sum = (sum ^ lane) * kMix;
      sum ^= sum >> 32;
    }
    return int64_t(sum);
  }

 private:
  static constexpr int kLanes = 8;

  void blocks(const uint8_t* from, int64_t size) {
    passes().add(nullptr, from, size, lane_, key_);
  }

  // Adds blocks to the lanes under their keys, which move on; copies them where ``into`` is not null.
  using Pass = void (*)(uint8_t* into, const uint8_t* from, int64_t size, uint64_t* lanes,
                        uint64_t* keys);

  struct Passes {
    Pass add, copy;
  };

  // Returns those with the widest vectors that run here; all add up the same.
  static const Passes& passes() {
#if defined(__x86_64__)
    static const Passes found = __builtin_cpu_supports("avx512f")
                                    ? Passes{avx512<false>, avx512<true>}
                                    : Passes{sse2<false>, sse2<true>};
#else
    static const Passes found = {plain<false>, plain<true>};
#endif
    return found;
  }

#if defined(__x86_64__)
  template <bool copies>
  __attribute__((target("avx512f"))) static void avx512(uint8_t* into, const uint8_t* from,
                                                        int64_t size, uint64_t* lanes,
                                                        uint64_t* keys) {
    __m512i lane = _mm512_loadu_si512(lanes), key = _mm512_loadu_si512(keys);
    const __m512i next = _mm512_set1_epi64(int64_t(kMix));
    const bool aligned = uintptr_t(into) % sizeof(__m512i) == 0;
    for (const uint8_t* end = from + size; from < end; from += kBlock) {
      const __m512i word = _mm512_loadu_si512(from);
      const __m512i mixed = _mm512_xor_si512(word, key);
      const __m512i product = _mm512_mul_epu32(mixed, _mm512_srli_epi64(mixed, 32));
      const __m512i swapped = _mm512_shuffle_epi32(word, _MM_PERM_CDAB);
      lane = _mm512_add_epi64(lane, _mm512_add_epi64(swapped, product));
      key = _mm512_add_epi64(key, next);
      if constexpr (copies) {
        if (aligned) {
          _mm512_stream_si512(reinterpret_cast<__m512i*>(into), word);
        } else {
          _mm512_storeu_si512(into, word);
        }
        into += kBlock;
      }
    }
    _mm512_storeu_si512(lanes, lane);
    _mm512_storeu_si512(keys, key);
  }

  template <bool copies>
  static void sse2(uint8_t* into, const uint8_t* from, int64_t size, uint64_t* lanes,
                   uint64_t* keys) {
    constexpr int kVectors = kLanes / 2;
    __m128i lane[kVectors], key[kVectors];
    std::memcpy(lane, lanes, sizeof lane);
    std::memcpy(key, keys, sizeof key);
    const __m128i next = _mm_set1_epi64x(int64_t(kMix));
    const bool aligned = uintptr_t(into) % sizeof(__m128i) == 0;
    for (const uint8_t* end = from + size; from < end; from += kBlock) {
      for (int i = 0; i < kVectors; ++i) {
        const __m128i word = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i);
        const __m128i mixed = _mm_xor_si128(word, key[i]);
        const __m128i product = _mm_mul_epu32(mixed, _mm_srli_epi64(mixed, 32));
        const __m128i swapped = _mm_shuffle_epi32(word, 0xB1);
        lane[i] = _mm_add_epi64(lane[i], _mm_add_epi64(swapped, product));
        key[i] = _mm_add_epi64(key[i], next);
        if constexpr (copies) {
          __m128i* const place = reinterpret_cast<__m128i*>(into) + i;
          if (aligned) {
            _mm_stream_si128(place, word);
          } else {
            _mm_storeu_si128(place, word);
          }
        }
      }
      if constexpr (copies) into += kBlock;
    }
    std::memcpy(lanes, lane, sizeof lane);
    std::memcpy(keys, key, sizeof key);
  }
#else
  template <bool copies>
  static void plain(uint8_t* into, const uint8_t* from, int64_t size, uint64_t* lanes,
                    uint64_t* keys) {
    if constexpr (copies) std::memcpy(into, from, size_t(size));
    for (const uint8_t* end = from + size; from < end; from += kBlock) {
      for (int i = 0; i < kLanes; ++i) {
        uint64_t word;
        std::memcpy(&word, from + i * 8, sizeof word);
        const uint64_t mixed = word ^ keys[i];
        lanes[i] += (word << 32 | word >> 32) + (mixed & 0xFFFFFFFF) * (mixed >> 32);
        keys[i] += kMix;
      }
    }
  }
#endif

  uint64_t lane_[kLanes] = {}, key_[kLanes];
  uint64_t size_ = 0;
};

}  // namespace checknrun

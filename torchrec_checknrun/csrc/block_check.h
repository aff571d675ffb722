// A check of bytes that costs little beside their copy: what changes them by mistake is found.
//
// Eight lanes of 64 bits each add up products of halves of their words, each word under a key of its
// own, so that words that change places are found. No defence against whoever knows it.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <emmintrin.h>
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

  int64_t sum() const {
    uint64_t sum = size_ ^ kMix;  // so that zeros alone are not their own check
    for (const uint64_t lane : lane_) {
      sum = (sum ^ lane) * kMix;
      sum ^= sum >> 32;
    }
    return int64_t(sum);
  }

 private:
  static constexpr int kLanes = 8;

#if defined(__SSE2__)
  void blocks(const uint8_t* from, int64_t size) {
    constexpr int kVectors = kLanes / 2;
    __m128i lane[kVectors], key[kVectors];
    std::memcpy(lane, lane_, sizeof lane);
    std::memcpy(key, key_, sizeof key);
    const __m128i next = _mm_set1_epi64x(int64_t(kMix));
    for (const uint8_t* end = from + size; from < end; from += kBlock) {
      for (int i = 0; i < kVectors; ++i) {
        const __m128i word = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i);
        const __m128i mixed = _mm_xor_si128(word, key[i]);
        const __m128i product = _mm_mul_epu32(mixed, _mm_srli_epi64(mixed, 32));
        const __m128i swapped = _mm_shuffle_epi32(word, 0xB1);
        lane[i] = _mm_add_epi64(lane[i], _mm_add_epi64(swapped, product));
        key[i] = _mm_add_epi64(key[i], next);
      }
    }
    std::memcpy(lane_, lane, sizeof lane);
    std::memcpy(key_, key, sizeof key);
  }
#else
  void blocks(const uint8_t* from, int64_t size) {
    for (const uint8_t* end = from + size; from < end; from += kBlock) {
      for (int i = 0; i < kLanes; ++i) {
        uint64_t word;
        std::memcpy(&word, from + i * 8, sizeof word);
        const uint64_t mixed = word ^ key_[i];
        lane_[i] += (word << 32 | word >> 32) + (mixed & 0xFFFFFFFF) * (mixed >> 32);
        key_[i] += kMix;
      }
    }
  }
#endif

  uint64_t lane_[kLanes] = {}, key_[kLanes];
  uint64_t size_ = 0;
};

}  // namespace checknrun

// Row-wise quantization of embedding rows: the interface of the kernel's three builds.
#pragma once

#include <cstdint>

namespace checknrun {

enum class Method : int { asymmetric = 0, symmetric = 1, greedy = 2, adaptive = 3 };
enum class Value : int { fp32 = 0, fp16 = 1, bf16 = 2 };

// The reason why a row was not encoded: its bytes are zero, and the caller must store it exactly.
// The last one is for inference alone: which zero of a row gives the bias its sign depends on
// FBGEMM's release.
enum Refusal : uint8_t { encoded = 0, not_finite = 1, too_large = 2, too_small = 3, two_zeros = 4 };

struct EncodeJob {
  const void* rows;     // (table rows, row_stride) values
  Value value;
  const int64_t* ids;   // which rows, or null: all from the first
  int64_t row_stride;   // in values
  int64_t dim;
  int bits;             // 2, 3, 4 or 8
  Method method;
  int num_bins;         // greedy: steps that the range is cut into
  float ratio;          // greedy: share of the range that may be cut away
  float factor;         // a power of two; values are multiplied by it first
  bool half_scale;      // at 8 bits: scale and bias in fp16, as inference has them
  uint8_t* out;
  int64_t row_bytes;
  uint8_t* refused;     // (rows,) Refusal
};

struct DecodeJob {
  const uint8_t* data;
  const int64_t* positions;  // which rows of data, or null: all from the first
  int64_t row_bytes;
  int64_t dim;
  int bits;
  float factor;         // results are multiplied by it
  const int64_t* ids;   // which rows of out, or null: all from the first
  void* out;
  Value value;
  int64_t row_stride;   // of out, in values
};

struct Kernels {
  // Encodes rows begin to end of the job; returns the number of refused rows.
  int64_t (*encode)(const EncodeJob&, int64_t begin, int64_t end);
  void (*decode)(const DecodeJob&, int64_t begin, int64_t end);
};

// Returns the bytes of a row's codes, without scale and bias. FBGEMM requires whole 16-bit words
// of the widths that it has.
inline int64_t code_bytes(int64_t dim, int bits) {
  return bits == 2 || bits == 4 ? (dim * bits + 15) / 16 * 2 : (dim * bits + 7) / 8;
}

extern const Kernels plain_kernels;
#if defined(__x86_64__) && defined(__GNUC__)
#define CHECKNRUN_X86 1
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
#endif

}  // namespace checknrun

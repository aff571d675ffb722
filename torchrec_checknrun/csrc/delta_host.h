// What the operations on grids have in common: memory that is checked, streams, parts for threads.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "delta.h"

namespace checknrun {

// Returns the kernel's build of that name; without one, the best that runs here.
const DeltaKernels& delta_kernels_of(const std::string& build);

inline void release(Streams& streams) {
  std::free(streams.extra.data);
  for (auto& of_class : streams.planes) {
    for (Stream& plane : of_class) std::free(plane.data);
  }
}

struct OwnedStreams : Streams {
  OwnedStreams() = default;
  OwnedStreams(const OwnedStreams&) = delete;
  OwnedStreams& operator=(const OwnedStreams&) = delete;
  ~OwnedStreams() { release(*this); }
};

template <typename T>
T* memory_of(const at::Tensor& tensor, at::IntArrayRef shape, const char* what) {
  TORCH_CHECK_VALUE(tensor.sizes() == shape && tensor.is_contiguous() &&
                        tensor.scalar_type() == c10::CppTypeToScalarType<T>::value &&
                        tensor.device().is_cpu(),
                    what, " must be contiguous ", c10::CppTypeToScalarType<T>::value, " of ",
                    shape, " on the CPU, not ", tensor.scalar_type(), " ", tensor.sizes());
  return tensor.mutable_data_ptr<T>();
}

inline void check(DeltaFault fault) {
  TORCH_CHECK_VALUE(fault != kNoPredecessor,
                    "a row is a difference, but has no predecessor on a grid");
  TORCH_CHECK_VALUE(fault != kExponentOutOfRange, "a row's exponent is out of range");
  TORCH_CHECK_VALUE(fault != kCodeOutOfRange, "a row's code exceeds ", kMostCode);
  TORCH_CHECK_VALUE(fault != kNotOnGrid, "a row is neither on a grid nor verbatim");
}

// Calls back with fault = work(begin, end) of parts of n rows; returns the first part's fault.
template <typename Work>
DeltaFault in_parts(int64_t n, int64_t parts, const Work& work) {
  std::vector<DeltaFault> faults(size_t(parts), kSound);
  at::parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
    for (int64_t part = first; part < last; ++part) {
      faults[size_t(part)] = work(part, n * part / parts, n * (part + 1) / parts);
    }
  });
  for (const DeltaFault fault : faults) {
    if (fault != kSound) return fault;
  }
  return kSound;
}

// About 256 KiB of rows pay for a thread.
inline int64_t parts_of(int64_t n, int64_t dim) {
  return std::clamp<int64_t>(n * dim / 65536, 1, at::get_num_threads());
}

inline Value value_of(const at::Tensor& weight) {
  switch (weight.scalar_type()) {
    case at::kFloat: return Value::fp32;
    case at::kHalf: return Value::fp16;
    case at::kBFloat16: return Value::bf16;
    default: TORCH_CHECK_TYPE(false, "rows must be float32, float16 or bfloat16, not ",
                              weight.scalar_type());
  }
}

// The bytes of all streams, in the payload's order: symbols, extra, planes by class.
using Sizes = std::vector<int64_t>;

inline Sizes sizes_of(const uint8_t* symbols, int64_t rows, int64_t dim) {
  std::array<int64_t, 256> counts{};
  for (int64_t r = 0; r < rows; ++r) ++counts[symbols[r]];
  Sizes sizes{rows, 0};
  std::array<int64_t, kClasses> of_class{};
  for (int symbol = 0; symbol < 256; ++symbol) {
    const int64_t count = counts[size_t(symbol)];
    if (count == 0) continue;
    const bool far = symbol >= kFarther, alone = !far && symbol % 8 == kAlone;
    const int c = far ? symbol - kFarther : symbol / 8;
    TORCH_CHECK_VALUE(far ? c < kVerbatimClass : c < kVerbatimClass || alone,
                      "no row has symbol ", symbol);
    of_class[size_t(c)] += count;
    if (far || (alone && c != kVerbatimClass)) sizes[1] += count;
  }
  for (int c = 1; c < kClasses; ++c) {
    for (int p = 0; p < kPlanes.count[c]; ++p) {
      sizes.push_back(of_class[size_t(c)] * plane_bytes(dim, kPlanes.of[c][p].width));
    }
  }
  return sizes;
}

// Joins the streams of all parts: symbols, extra, planes by class.
template <typename Parts>
at::Tensor join(const at::Tensor& symbols, const Parts& parts, const Sizes& sizes) {
  int64_t total = 0;
  for (const int64_t size : sizes) total += size;
  at::Tensor data = at::empty({total}, symbols.options());
  uint8_t* at = data.mutable_data_ptr<uint8_t>();
  const auto add = [&](const uint8_t* from, int64_t size) {
    if (size) std::memcpy(at, from, size_t(size));
    at += size;
  };
  add(symbols.const_data_ptr<uint8_t>(), symbols.numel());
  for (const Streams& part : parts) add(part.extra.data, part.extra.size);
  for (int c = 1; c < kClasses; ++c) {
    for (int p = 0; p < kPlanes.count[c]; ++p) {
      for (const Streams& part : parts) {
        add(part.planes[c][p].data, part.planes[c][p].size);
      }
    }
  }
  TORCH_INTERNAL_ASSERT(at == data.mutable_data_ptr<uint8_t>() + total);
  return data;
}

}  // namespace checknrun

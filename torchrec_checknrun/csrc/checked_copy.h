// Copies pieces of any size one after the other, and checks them on the way.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "block_check.h"

namespace checknrun {

class CheckedCopy {
 public:
  CheckedCopy(uint8_t* into, uint64_t seed) : next_(into), check_(seed) {}

  void add(const uint8_t* from, int64_t size) {
    if (filled_ > 0) {
      const int64_t some = std::min(size, BlockCheck::kBlock - filled_);
      std::memcpy(begun_ + filled_, from, size_t(some));
      filled_ += some;
      if (filled_ < BlockCheck::kBlock) return;
      copy(begun_, BlockCheck::kBlock);
      filled_ = 0;
      from += some;
      size -= some;
    }
    const int64_t whole = size / BlockCheck::kBlock * BlockCheck::kBlock;
    copy(from, whole);
    filled_ = size - whole;
    if (filled_ > 0) std::memcpy(begun_, from + whole, size_t(filled_));
  }

  // Ends the copy; returns the check of all of it.
  int64_t end() {
    if (filled_ > 0) std::memcpy(next_, begun_, size_t(filled_));
    check_.add(begun_, filled_);
    BlockCheck::finish_copies();
    return check_.sum();
  }

 private:
  void copy(const uint8_t* from, int64_t size) {
    check_.copy(next_, from, size);
    next_ += size;
  }

  uint8_t* next_;
  BlockCheck check_;
  uint8_t begun_[BlockCheck::kBlock];  // a block that comes in several pieces
  int64_t filled_ = 0;
};

}  // namespace checknrun

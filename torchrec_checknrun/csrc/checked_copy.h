// Copies pieces one after the other, and checks them while they are in the cache.
//
// In blocks: one memcpy of a large piece may be done by the processor's string instruction, which
// took more than twice the time of the same copy in blocks where it was measured.
#pragma once

#include <cstdint>
#include <cstring>

#include "block_check.h"

namespace checknrun {

class CheckedCopy {
 public:
  CheckedCopy(uint8_t* into, BlockCheck check) : next_(into), checked_(into), check_(check) {}

  void add(const uint8_t* from, int64_t size) {
    for (; size > kBlock; from += kBlock, size -= kBlock) {
      add_row(from, kBlock);
      check_some();
    }
    add_row(from, size);
    check_some();
  }

  // Copies without a look at how much is to be checked: ``check_some`` is to follow soon.
  void add_row(const uint8_t* from, int64_t size) {
    if (size == 4) {  // row-wise state: not worth a call
      std::memcpy(next_, from, 4);
    } else {
      std::memcpy(next_, from, size_t(size));
    }
    next_ += size;
  }

  void check_some() {
    if (next_ - checked_ >= kBlock) checked_ += check_.add_whole(checked_, next_ - checked_);
  }

  // The end of what was copied.
  uint8_t* next() const { return next_; }

  // Returns the check of all that was copied.
  int64_t sum() {
    check_.add(checked_, next_ - checked_);
    checked_ = next_;
    return check_.sum();
  }

 private:
  static constexpr int64_t kBlock = 4096;

  uint8_t* next_;
  const uint8_t* checked_;
  BlockCheck check_;
};

}  // namespace checknrun

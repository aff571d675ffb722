// Rows of one shard as of a cut: a row is copied before training overwrites it, or by the
// background, whoever comes first.
//
// Without torch, so that the race test compiles it with the thread sanitizer.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "overflow_rows.h"

namespace checknrun {

// Marks as they were at the cut: a byte per row, of which some bits count, or a bit per row.
struct FrozenMarks {
  const uint8_t* marks;
  uint8_t bits;
  bool packed;

  bool has(int64_t row) const {
    return packed ? (marks[row >> 3] >> (row & 7)) & 1 : (marks[row] & bits) != 0;
  }
};

// A tensor of the shard, with a row of ``row_bytes`` for each row of the shard.
struct LivePart {
  const uint8_t* live;
  int64_t row_bytes;
};

class CopyOnWrite {
 public:
  // Args:
  //   frozen: a row is in the set if any has it; empty: all rows are.
  //   states: a byte per row. 2 × generation: copied; one more: being copied; any other value: not
  //     yet. So no pass over rows has to clear them before the next cut.
  //   generation: 1 to 127, another one than that of the cuts since the states were cleared.
  CopyOnWrite(int64_t rows, std::vector<FrozenMarks> frozen, std::vector<LivePart> parts,
              std::atomic<uint8_t>* states, uint8_t generation, Pages& pages)
      : rows_(rows), frozen_(std::move(frozen)), parts_(std::move(parts)), states_(states),
        done_(uint8_t(2 * generation)), busy_(uint8_t(2 * generation + 1)),
        row_bytes_(total_bytes(parts_)), overflow_(pages, rows, row_bytes_) {}

  // Copies the rows with these ids that the set still needs, before they are overwritten.
  //
  // -1 is no row; FBGEMM takes any other id out of range for row 0, and so does this.
  //
  // Returns how many ids were handled: fewer than n where memory is short. Never waits but for a
  // row that another thread is just copying.
  int64_t protect(const int64_t* ids, int64_t n, bool beyond) {
    std::vector<std::pair<int64_t, int64_t>> wanted;  // row, place among the ids
    std::vector<OverflowRows::Slot*> slots;
    std::vector<int64_t> copied;
    for (int64_t begin = 0; begin < n; begin += kBatch) {
      if (abandoned_.load(std::memory_order_acquire)) return n;
      const int64_t end = std::min(n, begin + kBatch);
      wanted.clear();
      for (int64_t i = begin; i < end; ++i) {
        if (i + kLookAhead < end) look_ahead(corrected(ids[i + kLookAhead]));
        const int64_t row = corrected(ids[i]);
        if (row >= 0 && needed(row)) wanted.emplace_back(row, i);
      }
      slots.clear();
      copied.clear();
      const bool any = !wanted.empty();
      if (any) overflow_.reserve(wanted.size(), beyond, slots);
      size_t used = 0, at = 0;
      for (size_t i = 0; i < std::min<size_t>(kAhead, wanted.size()); ++i) fetch_ahead(wanted[i].first);
      for (; at < wanted.size(); ++at) {
        if (at + kAhead < wanted.size()) fetch_ahead(wanted[at + kAhead].first);
        const int64_t row = wanted[at].first;
        if (!needed(row)) continue;  // an id may come twice
        if (used == slots.size()) break;
        if (!claim(row)) continue;
        slots[used]->row = row;
        copy(row, slots[used++]->bytes());
        copied.push_back(row);
      }
      if (any) overflow_.publish(slots, used);
      for (const int64_t row : copied) states_[row].store(done_, std::memory_order_release);
      protected_.fetch_add(int64_t(used), std::memory_order_relaxed);
      const int64_t handled = at < wanted.size() ? wanted[at].second : end;
      for (int64_t i = begin; i < handled; ++i) await(corrected(ids[i]));
      if (handled < end) return handled;
    }
    return n;
  }

  // Copies n sorted rows of the set to the targets, one for each part, as of the cut.
  //
  // ``keep`` leaves rows for another call, which must all have been protected.
  void stage(const int64_t* rows, int64_t n, uint8_t* const* targets, bool keep) {
    std::vector<int64_t> elsewhere;  // places of the rows that a thread has copied or copies
    for (int64_t i = 0; i < n; ++i) {
      const int64_t row = rows[i];
      if (row < 0 || row >= rows_) throw std::out_of_range("a row is not in the shard");
      if (i + kStageAhead < n) fetch_ahead(std::clamp<int64_t>(rows[i + kStageAhead], 0, rows_ - 1));
      if (keep || !needed(row) || !claim(row)) {
        elsewhere.push_back(i);
        continue;
      }
      for (size_t p = 0; p < parts_.size(); ++p) {
        const int64_t size = parts_[p].row_bytes;
        std::memcpy(targets[p] + i * size, parts_[p].live + row * size, size_t(size));
      }
      states_[row].store(done_, std::memory_order_release);
    }
    if (!elsewhere.empty()) fetch(rows, elsewhere, targets, keep);
    if (!keep) staged_.fetch_add(n, std::memory_order_relaxed);
  }

  // Ends protection: the snapshot is not needed any more, or void.
  //
  // The release orders the rows that were staged before the updates of threads that see the end in
  // ``protect``, and so look at no row's state.
  void abandon() {
    abandoned_.store(true, std::memory_order_release);
    overflow_.discard();
  }
  bool abandoned() const { return abandoned_.load(std::memory_order_acquire); }

  int64_t held_in(int64_t start, int64_t stop) { return overflow_.held_in(start, stop); }
  int64_t held() { return overflow_.held(); }
  int64_t staged() const { return staged_.load(std::memory_order_relaxed); }
  int64_t protected_rows() const { return protected_.load(std::memory_order_relaxed); }
  int64_t longest_wait_ns() const { return longest_wait_.load(std::memory_order_relaxed); }
  const std::vector<LivePart>& parts() const { return parts_; }

 private:
  static constexpr int64_t kBatch = 512, kAhead = 8, kLookAhead = 32, kStageAhead = 16;
  static constexpr int64_t kLine = 64, kMostAhead = 1024;

  static int64_t total_bytes(const std::vector<LivePart>& parts) {
    int64_t total = 0;
    for (const LivePart& part : parts) total += part.row_bytes;
    return total;
  }

  int64_t corrected(int64_t id) const {
    if (id >= 0 && id < rows_) return id;
    return id == -1 || rows_ == 0 ? -1 : 0;
  }

  bool in_set(int64_t row) const {
    if (frozen_.empty()) return true;
    for (const FrozenMarks& marks : frozen_) {
      if (marks.has(row)) return true;
    }
    return false;
  }

  // Ids lie all over the shard: memory is asked for ahead, since most of the time goes by waiting
  // for it.
  void look_ahead(int64_t row) const {
    if (row < 0) return;
    __builtin_prefetch(&states_[row]);
    for (const FrozenMarks& marks : frozen_) {
      __builtin_prefetch(marks.marks + (marks.packed ? row >> 3 : row));
    }
  }

  void fetch_ahead(int64_t row) const {
    for (const LivePart& part : parts_) prefetch(part.live + row * part.row_bytes, part.row_bytes);
  }

  static void prefetch(const uint8_t* from, int64_t bytes) {
    for (int64_t at = 0; at < std::min(bytes, kMostAhead); at += kLine) __builtin_prefetch(from + at);
  }

  // Tells whether no thread has copied the row, nor copies it.
  bool needed(int64_t row) const {
    const uint8_t state = states_[row].load(std::memory_order_acquire);
    return state != done_ && state != busy_ && in_set(row);
  }

  bool claim(int64_t row) {
    uint8_t state = states_[row].load(std::memory_order_relaxed);
    while (state != done_ && state != busy_) {
      if (states_[row].compare_exchange_weak(state, busy_, std::memory_order_acquire)) return true;
    }
    return false;
  }

  void copy(int64_t row, uint8_t* into) const {
    for (const LivePart& part : parts_) {
      std::memcpy(into, part.live + row * part.row_bytes, size_t(part.row_bytes));
      into += part.row_bytes;
    }
  }

  // Waits while another thread copies the row.
  void await(int64_t row) {
    if (row < 0 || states_[row].load(std::memory_order_acquire) != busy_) return;
    const auto started = std::chrono::steady_clock::now();
    for (int turn = 0; states_[row].load(std::memory_order_acquire) == busy_; ++turn) {
      if (turn >= 64) std::this_thread::yield();
    }
    const int64_t waited = (std::chrono::steady_clock::now() - started) / std::chrono::nanoseconds(1);
    int64_t longest = longest_wait_.load(std::memory_order_relaxed);
    while (waited > longest && !longest_wait_.compare_exchange_weak(longest, waited)) {
    }
  }

  void fetch(const int64_t* rows, const std::vector<int64_t>& places, uint8_t* const* targets,
             bool keep) {
    for (const int64_t place : places) await(rows[place]);
    std::vector<OverflowRows::Slot*> slots;
    struct Release {
      OverflowRows& from;
      const std::vector<OverflowRows::Slot*>& slots;
      bool taken;
      ~Release() { from.release(slots, taken); }
    };
    overflow_.find(rows[places.front()], rows[places.back()], !keep, slots);
    const Release release{overflow_, slots, !keep};
    if (!keep && slots.size() != places.size()) {
      throw std::logic_error("a chunk leaves out rows of its range, or holds a row twice");
    }
    size_t at = 0, ahead = 0;
    for (const int64_t place : places) {
      while (at < slots.size() && slots[at]->row < rows[place]) ++at;
      for (; ahead < std::min(at + kAhead, slots.size()); ++ahead) {
        prefetch(slots[ahead]->bytes(), row_bytes_);
      }
      if (at == slots.size() || slots[at]->row != rows[place]) {
        throw std::logic_error("a row was staged twice, or is not in the set");
      }
      const uint8_t* from = slots[at]->bytes();
      for (size_t p = 0; p < parts_.size(); ++p) {
        const int64_t size = parts_[p].row_bytes;
        std::memcpy(targets[p] + place * size, from, size_t(size));
        from += size;
      }
    }
  }

  const int64_t rows_;
  const std::vector<FrozenMarks> frozen_;
  const std::vector<LivePart> parts_;
  std::atomic<uint8_t>* const states_;
  const uint8_t done_, busy_;
  const int64_t row_bytes_;
  OverflowRows overflow_;
  std::atomic<bool> abandoned_{false};
  std::atomic<int64_t> staged_{0}, protected_{0}, longest_wait_{0};
};

}  // namespace checknrun

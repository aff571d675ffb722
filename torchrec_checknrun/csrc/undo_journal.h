// Rows as they were before a step, so that the step can be undone by another process.
//
// A journal is a piece of memory that outlives the process. It holds segments: the number of a
// shard, a count, a check of all of it, that many row ids, and as many rows, each of all parts of the
// shard. All but the rows are int64; a segment begins at a multiple of eight bytes.
//
// Without torch, as copy_on_write.h is.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "block_check.h"

namespace checknrun {

// Stores a word so that everything stored before it is there for whoever reads it.
inline void publish_word(int64_t* word, int64_t value) {
  static_assert(std::atomic_ref<int64_t>::is_always_lock_free);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  std::atomic_ref<int64_t>(*word).store(value, std::memory_order_seq_cst);
}

// A word is stored at once, so its check must be part of it: 48 bits of value, and 16 that follow from
// the value and from the word's place. A bit that is flipped, and a word in another place, are found.
constexpr int kValueBits = 48;

inline uint64_t sealed_word(int64_t at, int64_t value) {
  const uint64_t low = uint64_t(value) & ((uint64_t(1) << kValueBits) - 1);
  const uint64_t check = (low | uint64_t(at) << kValueBits) * kMix >> kValueBits;
  return low | check << kValueBits;
}

inline bool fits_word(int64_t value) {
  constexpr int64_t limit = int64_t(1) << (kValueBits - 1);
  return value >= -limit && value < limit;
}

inline int64_t word_value(uint64_t word) {
  return int64_t(word << (64 - kValueBits)) >> (64 - kValueBits);
}

// Returns a check of a segment, to which its ids and rows are to be added.
inline BlockCheck segment_check(int64_t shard, int64_t count) {
  return BlockCheck(uint64_t(shard) * kMix ^ uint64_t(count));
}

// A tensor of a shard, with a row of ``row_bytes`` for each row of the shard.
struct JournaledPart {
  uint8_t* live;
  int64_t row_bytes;
};

// A shard whose rows are journaled.
struct JournaledShard {
  int64_t rows;
  std::vector<JournaledPart> parts;
  uint8_t* intervals;  // by row: the interval between two cuts in which it was last modified

  int64_t row_bytes() const {
    int64_t total = 0;
    for (const JournaledPart& part : parts) total += part.row_bytes;
    return total;
  }
};

struct Undone {
  int64_t rows = 0;
  int64_t changed = 0;  // of these, rows that were not yet as they are now
};

class UndoJournal {
 public:
  explicit UndoJournal(std::vector<JournaledShard> shards) : shards_(std::move(shards)) {
    for (const JournaledShard& shard : shards_) {
      seen_.emplace_back(size_t(shard.rows), uint8_t(0));
      wanted_.emplace_back();
    }
  }

  // Begins a step: rows are journaled again that were journaled in the one before.
  void begin() {
    for (std::vector<int64_t>& rows : wanted_) rows.clear();
    wanted_bytes_ = 0;
    interval_ = kNoInterval;
    noted_again_ = false;
    if (++generation_ != 0) return;
    for (std::vector<uint8_t>& seen : seen_) std::fill(seen.begin(), seen.end(), uint8_t(0));
    generation_ = 1;
  }

  // Collects the rows with these ids that the step has not journaled yet. ``write`` notes the
  // interval of these; after a cut within the step, rows that it journaled before have another one.
  //
  // -1 is no row; FBGEMM takes any other id out of range for row 0, and so does this.
  void collect(size_t shard, const int64_t* ids, int64_t n, uint8_t interval) {
    const JournaledShard& of = shards_.at(shard);
    if (of.rows == 0) return;
    noted_again_ = noted_again_ || (interval_ != kNoInterval && interval_ != interval);
    interval_ = interval;
    if (noted_again_ && of.intervals) {
      for (int64_t i = 0; i < n; ++i) {
        const int64_t row = corrected(ids[i], of.rows);
        if (row >= 0) of.intervals[row] = interval;
      }
    }
    const uint8_t generation = generation_;  // a copy, which no store to ``seen`` could change
    uint8_t* const seen = seen_[shard].data();
    if (found_.size() < size_t(n)) found_.resize(size_t(n));
    int64_t* next = found_.data();
    for (int64_t i = 0; i < n; ++i) {
      // Of any id: to prefetch is no access, and never a fault.
      if (i + kAhead < n) prefetch(uintptr_t(seen) + uint64_t(ids[i + kAhead]));
      const int64_t row = corrected(ids[i], of.rows);
      if (row < 0) continue;
      *next = row;  // without a branch, which nobody could predict
      next += seen[row] != generation;
      seen[row] = generation;
    }
    const int64_t count = next - found_.data();
    if (count == 0) return;
    std::vector<int64_t>& wanted = wanted_[shard];
    if (wanted.empty()) wanted_bytes_ += kHeader;
    wanted.insert(wanted.end(), found_.data(), next);
    wanted_bytes_ += count * (int64_t(sizeof(int64_t)) + of.row_bytes());
    // A segment is padded to eight bytes; where it is, is not known before all of it is collected.
  }

  // Bytes that ``write`` takes at most.
  int64_t wanted_bytes() const {
    return wanted_bytes_ == 0 ? 0 : wanted_bytes_ + int64_t(shards_.size()) * 8;
  }

  // Writes the collected rows; returns the number of bytes written.
  int64_t write(uint8_t* into) {
    uint8_t* at = into;
    for (size_t s = 0; s < shards_.size(); ++s) {
      const std::vector<int64_t>& rows = wanted_[s];
      if (rows.empty()) continue;
      const int64_t shard = int64_t(s), count = int64_t(rows.size());
      uint8_t* const ids = at + kHeader;
      BlockCheck check = segment_check(shard, count);
      uint8_t* const end = write_rows(shards_[s], rows, ids, interval_, check);
      const int64_t header[3] = {shard, count, check.sum()};
      std::memcpy(at, header, sizeof header);
      at = end;
      wanted_[s].clear();
    }
    wanted_bytes_ = 0;
    return at - into;
  }

  // Throws if the bytes are no journal of these shards.
  void verify(const uint8_t* from, int64_t size) const {
    visit(from, size, [](const JournaledShard&, int64_t, const uint8_t*) {});
  }

  // Puts the rows of a journal back, all of them or none, and notes the interval.
  //
  // Within one journal a row comes once. Throws if the bytes are no journal of these shards.
  Undone undo(const uint8_t* from, int64_t size, uint8_t interval) const {
    verify(from, size);
    Undone undone;
    visit(from, size, [&](const JournaledShard& shard, int64_t row, const uint8_t* bytes) {
      bool changed = false;
      for (const JournaledPart& part : shard.parts) {
        uint8_t* live = part.live + row * part.row_bytes;
        changed = changed || std::memcmp(live, bytes, size_t(part.row_bytes)) != 0;
        std::memcpy(live, bytes, size_t(part.row_bytes));
        bytes += part.row_bytes;
      }
      if (shard.intervals) shard.intervals[row] = interval;
      ++undone.rows;
      undone.changed += changed;
    });
    return undone;
  }

  const std::vector<JournaledShard>& shards() const { return shards_; }

 private:
  static constexpr uint8_t kNoInterval = 0;  // that of rows never changed
  static constexpr int64_t kHeader = 3 * int64_t(sizeof(int64_t));
  static constexpr int64_t kAhead = 24, kLine = 64, kMostAhead = 1024, kChecked = 4096;

  static void prefetch(uintptr_t address) {
    __builtin_prefetch(reinterpret_cast<const void*>(address), 1);
  }

  static int64_t padding_of(int64_t size) { return -size & 7; }

  static int64_t corrected(int64_t id, int64_t rows) {
    if (id >= 0 && id < rows) return id;
    return id == -1 ? -1 : 0;
  }

  // Writes ids, rows and padding, and adds them to the check while they are in the cache; notes the
  // rows' interval; returns the end.
  static uint8_t* write_rows(const JournaledShard& shard, const std::vector<int64_t>& rows,
                             uint8_t* into, uint8_t interval, BlockCheck& check) {
    const uint8_t* checked = into;
    std::memcpy(into, rows.data(), rows.size() * sizeof(int64_t));
    into += rows.size() * sizeof(int64_t);
    for (size_t i = 0; i < rows.size(); ++i) {
      if (i + kAhead < rows.size()) {
        for (const JournaledPart& part : shard.parts) {
          const uint8_t* next = part.live + rows[i + kAhead] * part.row_bytes;
          for (int64_t at = 0; at < part.row_bytes && at < kMostAhead; at += kLine) {
            __builtin_prefetch(next + at);
          }
        }
        if (shard.intervals) __builtin_prefetch(shard.intervals + rows[i + kAhead], 1);
      }
      if (shard.intervals) shard.intervals[rows[i]] = interval;
      for (const JournaledPart& part : shard.parts) {
        const uint8_t* from = part.live + rows[i] * part.row_bytes;
        if (part.row_bytes == 4) {  // row-wise state: not worth a call
          std::memcpy(into, from, 4);
        } else {
          std::memcpy(into, from, size_t(part.row_bytes));
        }
        into += part.row_bytes;
      }
      if (into - checked >= kChecked) checked += check.add_whole(checked, into - checked);
    }
    const int64_t padding = padding_of(int64_t(rows.size()) * shard.row_bytes());
    std::memset(into, 0, size_t(padding));
    into += padding;
    check.add(checked, into - checked);
    return into;
  }

  template <typename Act>
  void visit(const uint8_t* from, int64_t size, Act act) const {
    int64_t at = 0;
    while (at < size) {
      int64_t header[3];
      if (size - at < kHeader) throw std::invalid_argument("a segment's header is cut off");
      std::memcpy(header, from + at, sizeof header);
      at += kHeader;
      const auto [number, count, check] = header;
      if (number < 0 || number >= int64_t(shards_.size())) {
        throw std::invalid_argument("a segment names no shard");
      }
      const JournaledShard& shard = shards_[size_t(number)];
      const int64_t row_bytes = shard.row_bytes(), each = row_bytes + int64_t(sizeof(int64_t));
      if (count < 0 || count > shard.rows || count > (size - at) / each) {
        throw std::invalid_argument("a segment's rows are cut off");
      }
      const int64_t whole = count * each + padding_of(count * each);
      if (whole > size - at) throw std::invalid_argument("a segment's end is cut off");
      const uint8_t* ids = from + at;
      const uint8_t* bytes = ids + count * int64_t(sizeof(int64_t));
      BlockCheck found = segment_check(number, count);
      found.add(ids, whole);
      if (check != found.sum()) throw std::invalid_argument("a segment is damaged");
      for (int64_t i = 0; i < count; ++i) {
        int64_t row;
        std::memcpy(&row, ids + i * int64_t(sizeof row), sizeof row);
        if (row < 0 || row >= shard.rows) throw std::invalid_argument("a row is not in its shard");
        act(shard, row, bytes + i * row_bytes);
      }
      at += whole;
    }
  }

  const std::vector<JournaledShard> shards_;
  std::vector<std::vector<uint8_t>> seen_;     // by row: the last step that has journaled it
  std::vector<std::vector<int64_t>> wanted_;  // by shard: the rows collected
  int64_t wanted_bytes_ = 0;
  std::vector<int64_t> found_;  // memory of ``collect``
  uint8_t generation_ = 0;
  uint8_t interval_ = kNoInterval;  // of the rows that the step has collected last
  bool noted_again_ = false;        // whether there was a cut between two changes of the step
};

}  // namespace checknrun

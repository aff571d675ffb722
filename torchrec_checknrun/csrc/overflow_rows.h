// Copies of a shard's rows in a fixed amount of memory, until the background has taken them.
//
// Without torch, so that the race test compiles it with the thread sanitizer.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

namespace checknrun {

// A pool of pages in one block of memory, shared by the overflow rows of all shards.
class Pages {
 public:
  Pages(uint8_t* memory, int64_t bytes, int64_t page) : memory_(memory), page_(page) {
    total_ = bytes / page;
    free_.reserve(size_t(total_));
    for (int64_t i = total_; i-- > 0;) free_.push_back(memory + i * page);  // the first one first
  }

  // Returns a page, or null if none is free and ``beyond`` doesn't allow memory of the heap.
  uint8_t* take(bool beyond) {
    std::lock_guard<std::mutex> hold(mutex_);
    if (!free_.empty()) {
      uint8_t* page = free_.back();
      free_.pop_back();
      return page;
    }
    if (!beyond) return nullptr;
    return static_cast<uint8_t*>(::operator new(size_t(page_), std::align_val_t(64)));
  }

  void give(uint8_t* page) {
    if (page < memory_ || page >= memory_ + total_ * page_) {
      ::operator delete(page, std::align_val_t(64));
      return;
    }
    std::lock_guard<std::mutex> hold(mutex_);
    free_.push_back(page);
  }

  int64_t page() const { return page_; }
  int64_t total() const { return total_; }

  int64_t free() {
    std::lock_guard<std::mutex> hold(mutex_);
    return int64_t(free_.size());
  }

 private:
  uint8_t* memory_;
  int64_t page_, total_;
  std::mutex mutex_;
  std::vector<uint8_t*> free_;
};

// The copied rows of one shard, by buckets of neighbouring rows.
//
// A slot is reserved before its row is claimed, so that no claimed row waits for memory; it is
// published once its bytes are there. A slot that was given back serves the shard's next row, since
// the rows of one step lie all over the shard: pages would not become free before the last chunks.
// A page goes back to the pool with the last of its slots.
class OverflowRows {
 public:
  static constexpr size_t kNot = SIZE_MAX;
  struct Slot;
  struct Page {
    uint8_t* memory;
    int64_t used = 0;
    Slot* free = nullptr;  // slots that were given back
    size_t place = 0;      // in ``all_``
    size_t listed = kNot;  // place in ``with_free_``, or kNot
  };
  struct Slot {
    int64_t row;
    Slot* next;
    Page* page;
    int64_t padding;  // the bytes that follow begin at a multiple of 16
    uint8_t* bytes() { return reinterpret_cast<uint8_t*>(this + 1); }
  };

  OverflowRows(Pages& pages, int64_t rows, int64_t row_bytes)
      : pages_(pages), slot_bytes_(int64_t(sizeof(Slot)) + (row_bytes + 15) / 16 * 16) {
    const size_t buckets = size_t(rows / kBucket + 1);
    // calloc's memory is touched where rows are copied only: a cut takes no longer for more rows.
    heads_.reset(static_cast<Slot**>(std::calloc(buckets, sizeof(Slot*))));
    counts_.reset(static_cast<int32_t*>(std::calloc(buckets, sizeof(int32_t))));
    if (!heads_ || !counts_) throw std::bad_alloc();
  }

  ~OverflowRows() { drop(); }

  // Gives all pages back, as soon as nobody is between reserve and publish, or find and release:
  // whoever still refers to these rows (an error's traceback) must not keep the memory.
  void discard() {
    std::lock_guard<std::mutex> hold(mutex_);
    discarded_ = true;
    if (users_ == 0) drop();
  }

  // Reserves at most n slots, until ``publish``; fewer where memory is short.
  void reserve(size_t n, bool beyond, std::vector<Slot*>& into) {
    into.clear();
    std::lock_guard<std::mutex> hold(mutex_);
    ++users_;
    while (!discarded_ && into.size() < n) {
      Slot* slot = new_slot(beyond);
      if (!slot) return;
      into.push_back(slot);
    }
  }

  // Publishes the first n slots, whose rows and bytes are set, and gives the other ones back.
  void publish(const std::vector<Slot*>& slots, size_t n) {
    std::lock_guard<std::mutex> hold(mutex_);
    if (leave()) return;
    for (size_t i = 0; i < n; ++i) {
      const size_t bucket = size_t(slots[i]->row / kBucket);
      slots[i]->next = heads_.get()[bucket];
      heads_.get()[bucket] = slots[i];
      ++counts_.get()[bucket];
    }
    held_ += int64_t(n);
    for (size_t i = n; i < slots.size(); ++i) unuse(slots[i]);
  }

  // Collects the rows in [first, last], sorted, which stay where they are until ``release``;
  // ``take`` unlinks them.
  void find(int64_t first, int64_t last, bool take, std::vector<Slot*>& into) {
    into.clear();
    std::vector<Slot*> lists;
    std::vector<int64_t> starts;  // of each list's rows among all
    int64_t total = 0;
    {
      std::lock_guard<std::mutex> hold(mutex_);
      ++users_;
      if (discarded_) return;
      for (int64_t b = first / kBucket; b <= last / kBucket; ++b) {
        int64_t count = 0;
        Slot* list = part_of(b, first, last, take, count);
        if (!list) continue;
        lists.push_back(list);
        starts.push_back(total);
        total += count;
      }
      if (!take) return collect(lists, starts, total, into);
    }
    collect(lists, starts, total, into);  // nobody else knows these rows any more
  }

  // Gives back the slots that were found, if they were taken.
  void release(const std::vector<Slot*>& slots, bool taken) {
    std::lock_guard<std::mutex> hold(mutex_);
    if (leave() || !taken) return;
    for (Slot* slot : slots) unuse(slot);
  }

  // Returns about how many rows of [start, stop) are held, in whole buckets.
  int64_t held_in(int64_t start, int64_t stop) {
    std::lock_guard<std::mutex> hold(mutex_);
    int64_t held = 0;
    for (int64_t b = start / kBucket; b * kBucket < stop; ++b) held += counts_.get()[b];
    return held;
  }

  int64_t held() {
    std::lock_guard<std::mutex> hold(mutex_);
    return held_;
  }

 private:
  static constexpr int64_t kBucket = 512;
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };

  struct Found {
    int64_t row;
    Slot* slot;
  };

  // Returns a bucket's rows in [first, last] as a list, and their number. All of them: as they are
  // linked; of a bucket at the range's ends those that are taken, or first in it.
  Slot* part_of(int64_t bucket, int64_t first, int64_t last, bool take, int64_t& count) {
    Slot*& head = heads_.get()[bucket];
    int32_t& held = counts_.get()[bucket];
    const bool whole = first <= bucket * kBucket && (bucket + 1) * kBucket - 1 <= last;
    Slot *inside = nullptr, *outside = nullptr;
    if (whole) {
      count = held;
      inside = head;
    } else {
      for (Slot *slot = head, *next; slot; slot = next) {
        next = slot->next;
        const bool in = first <= slot->row && slot->row <= last;
        slot->next = in ? inside : outside;
        (in ? inside : outside) = slot;
        count += in;
      }
      head = outside;
    }
    if (take) {
      held -= int32_t(count);
      held_ -= count;
      if (whole) head = nullptr;
    } else if (!whole && inside) {
      Slot* end = inside;
      while (end->next) end = end->next;
      end->next = outside;
      head = inside;
    }
    return inside;
  }

  // Sorts the rows of lists of neighbouring buckets, of each so many as lie before the next one's
  // start. Slots lie all over the memory: the lists are followed side by side, so that many are
  // fetched at a time.
  static void collect(const std::vector<Slot*>& lists, const std::vector<int64_t>& starts,
                      int64_t total, std::vector<Slot*>& into) {
    std::vector<Found> found(static_cast<size_t>(total));
    std::vector<Slot*> at(lists);
    const auto stop = [&](size_t i) { return i + 1 < starts.size() ? starts[i + 1] : total; };
    for (Slot* head : at) __builtin_prefetch(head);
    int64_t left = total;
    for (int64_t turn = 0; left > 0; ++turn) {
      for (size_t i = 0; i < at.size(); ++i) {
        const int64_t place = starts[i] + turn;
        if (place >= stop(i)) continue;
        found[size_t(place)] = {at[i]->row, at[i]};
        at[i] = at[i]->next;
        __builtin_prefetch(at[i]);
        --left;
      }
    }
    into.reserve(found.size());
    for (size_t i = 0; i < starts.size(); ++i) {
      std::sort(found.begin() + starts[i], found.begin() + stop(i),
                [](const Found& one, const Found& other) { return one.row < other.row; });
    }
    for (const Found& each : found) into.push_back(each.slot);
  }

  // Returns whether the pages were discarded; the last one to leave gives them back.
  bool leave() {
    --users_;
    if (discarded_ && users_ == 0) drop();
    return discarded_;
  }

  void drop() {
    for (Page* page : all_) {
      pages_.give(page->memory);
      delete page;
    }
    all_.clear();
    held_ = 0;
  }

  Slot* new_slot(bool beyond) {
    if (!with_free_.empty()) {
      Page* page = with_free_.back();
      Slot* slot = page->free;
      page->free = slot->next;
      if (!page->free) {
        page->listed = kNot;
        with_free_.pop_back();
      }
      ++page->used;
      return new (slot) Slot{-1, nullptr, page, 0};
    }
    if (!current_ || at_ + slot_bytes_ > pages_.page()) {
      Page* page = new_page(beyond);
      if (!page) return nullptr;
      current_ = page;
      at_ = 0;
    }
    Slot* slot = new (current_->memory + at_) Slot{-1, nullptr, current_, 0};
    ++current_->used;
    at_ += slot_bytes_;
    return slot;
  }

  Page* new_page(bool beyond) {
    if (slot_bytes_ > pages_.page()) return nullptr;
    uint8_t* memory = pages_.take(beyond);
    if (!memory) return nullptr;
    all_.push_back(new Page{memory});
    all_.back()->place = all_.size() - 1;
    return all_.back();
  }

  // Takes a page out of a list in constant time, however many there are: the last one takes its
  // place.
  static void take_out(std::vector<Page*>& from, Page* page, size_t Page::*place) {
    from.back()->*place = page->*place;
    from[page->*place] = from.back();
    from.pop_back();
  }

  void unuse(Slot* slot) {
    Page* page = slot->page;
    if (--page->used > 0) {
      slot->next = page->free;
      page->free = slot;
      if (page->listed == kNot) {
        page->listed = with_free_.size();
        with_free_.push_back(page);
      }
      return;
    }
    if (page->listed != kNot) take_out(with_free_, page, &Page::listed);
    if (page == current_) current_ = nullptr;
    pages_.give(page->memory);
    take_out(all_, page, &Page::place);
    delete page;
  }

  Pages& pages_;
  const int64_t slot_bytes_;
  std::mutex mutex_;
  std::unique_ptr<Slot*, Free> heads_;
  std::unique_ptr<int32_t, Free> counts_;
  std::vector<Page*> all_, with_free_;
  Page* current_ = nullptr;
  int64_t at_ = 0, held_ = 0, users_ = 0;
  bool discarded_ = false;
};

}  // namespace checknrun

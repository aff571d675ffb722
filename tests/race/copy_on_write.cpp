// Race training threads against the background over the rows of one cut after the other.
//
// Compiled with the thread sanitizer by `make race`. Three threads update rows at full speed, each
// its own rows, after protecting them and others; a fourth one stages chunks, samples some rows
// first and gives up every seventh cut halfway. Each staged row must be that of the cut, each row
// of the set staged once. Prints the number of rows that two threads wanted at the same cut.

#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include "../../torchrec_checknrun/csrc/copy_on_write.h"

using namespace checknrun;

namespace {

constexpr int64_t kRows = 20'000, kChunk = 700, kTrainers = 3, kOverflow = 1 << 18, kPage = 1 << 13;

struct Table {
  std::vector<uint64_t> weight = std::vector<uint64_t>(kRows * 3);
  std::vector<uint32_t> state = std::vector<uint32_t>(kRows);

  void update(int64_t row) {
    for (int64_t i = row * 3; i < row * 3 + 3; ++i) ++weight[size_t(i)];
    ++state[size_t(row)];
  }
};

void fail(const char* why, int64_t row) {
  std::printf("%s: row %lld\n", why, static_cast<long long>(row));
  std::exit(1);
}

struct Cut {
  std::vector<uint8_t> marks = std::vector<uint8_t>(kRows);
  std::vector<uint8_t> packed = std::vector<uint8_t>((kRows + 7) / 8);
  std::vector<uint64_t> expected;
  std::vector<int64_t> rows;
};

void train(Table& table, CopyOnWrite& copies, int64_t own, unsigned seed, std::atomic<int>& ended) {
  std::mt19937_64 random(seed);
  std::vector<int64_t> ids;
  for (bool last = false; !last;) {
    ids.clear();
    for (int i = 0; i < 300; ++i) ids.push_back(int64_t(random() % kRows));
    ids.push_back(-1);
    ids.push_back(ids.front());
    int64_t handled = 0;
    while (handled < int64_t(ids.size())) {
      handled += copies.protect(ids.data() + handled, int64_t(ids.size()) - handled, false);
      if (handled < int64_t(ids.size())) std::this_thread::yield();  // memory is full
    }
    last = copies.abandoned();
    if (last) {
      // Another thread may still be copying one of these rows, for nobody: that is no race to find.
      for (++ended; ended.load() < kTrainers;) std::this_thread::yield();
    }
    for (const int64_t id : ids) {
      if (id >= 0 && id % kTrainers == own) table.update(id);
    }
  }
}

void stage(const Cut& cut, CopyOnWrite& copies, std::mt19937_64& random, bool halfway) {
  std::vector<uint64_t> weight(kRows * 3);
  std::vector<uint32_t> state(kRows);
  uint8_t* targets[] = {reinterpret_cast<uint8_t*>(weight.data()),
                        reinterpret_cast<uint8_t*>(state.data())};
  const auto check = [&](const std::vector<int64_t>& rows) {
    for (size_t i = 0; i < rows.size(); ++i) {
      for (size_t k = 0; k < 3; ++k) {
        if (weight[i * 3 + k] != cut.expected[size_t(rows[i])]) fail("not of the cut", rows[i]);
      }
      if (state[i] != uint32_t(cut.expected[size_t(rows[i])])) fail("state not of the cut", rows[i]);
    }
  };
  std::vector<int64_t> sampled;
  for (size_t i = 0; i < cut.rows.size(); i += 97) sampled.push_back(cut.rows[i]);
  if (copies.protect(sampled.data(), int64_t(sampled.size()), true) != int64_t(sampled.size())) {
    fail("a sample found no memory", 0);
  }
  copies.stage(sampled.data(), int64_t(sampled.size()), targets, true);
  check(sampled);
  std::vector<size_t> chunks;
  for (size_t at = 0; at < cut.rows.size(); at += kChunk) chunks.push_back(at);
  std::shuffle(chunks.begin(), chunks.end(), random);
  if (halfway) chunks.resize(chunks.size() / 2);
  for (const size_t at : chunks) {
    const size_t end = std::min(cut.rows.size(), at + size_t(kChunk));
    const std::vector<int64_t> rows(cut.rows.begin() + int64_t(at), cut.rows.begin() + int64_t(end));
    copies.stage(rows.data(), int64_t(rows.size()), targets, false);
    check(rows);
  }
  if (!halfway && copies.staged() != int64_t(cut.rows.size())) fail("rows are missing", copies.staged());
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t wanted = argc > 1 ? std::atoll(argv[1]) : 1'000'000;
  std::mt19937_64 random(argc > 2 ? std::atoll(argv[2]) : 1);
  Table table;
  std::vector<std::atomic<uint8_t>> states(kRows);
  std::vector<uint8_t> memory(kOverflow + 64);
  uint8_t* aligned = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
  Pages pages(aligned, kOverflow, kPage);
  int64_t races = 0, cuts = 0;
  for (; races < wanted; ++cuts) {
    const uint8_t generation = uint8_t(cuts % 127 + 1);
    if (generation == 1) {
      for (auto& state : states) state.store(0);
    }
    Cut cut;
    for (int64_t row = 0; row < kRows; ++row) {
      cut.marks[size_t(row)] = uint8_t(random() % 8);
      if (random() % 16 == 0) cut.packed[size_t(row / 8)] |= uint8_t(1 << (row % 8));
      cut.expected.push_back(table.weight[size_t(row * 3)]);
    }
    std::vector<FrozenMarks> frozen;
    if (cuts % 3) frozen = {{cut.marks.data(), 1, false}, {cut.packed.data(), 0, true}};
    for (int64_t row = 0; row < kRows; ++row) {
      bool in = frozen.empty();
      for (const FrozenMarks& marks : frozen) in |= marks.has(row);
      if (in) cut.rows.push_back(row);
    }
    {
      CopyOnWrite copies(kRows, frozen,
                         {{reinterpret_cast<uint8_t*>(table.weight.data()), 24},
                          {reinterpret_cast<uint8_t*>(table.state.data()), 4}},
                         states.data(), generation, pages);
      std::atomic<int> ended{0};
      std::vector<std::thread> trainers;
      for (int64_t own = 0; own < kTrainers; ++own) {
        trainers.emplace_back(train, std::ref(table), std::ref(copies), own, unsigned(random()),
                              std::ref(ended));
      }
      stage(cut, copies, random, cuts % 7 == 6);
      copies.abandon();  // training goes on for one step: without protection
      for (std::thread& trainer : trainers) trainer.join();
      races += copies.protected_rows();
    }
    if (pages.free() != pages.total()) fail("pages were lost", pages.free());
  }
  std::printf("%lld rows copied before an update, over %lld cuts: all of their cut\n",
              static_cast<long long>(races), static_cast<long long>(cuts));
}

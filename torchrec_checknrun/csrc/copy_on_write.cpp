// torch.classes.checknrun: rows as of a cut, copied before training overwrites them.
#include <torch/custom_class.h>
#include <torch/library.h>

#include "copy_on_write.h"
#include "row_vector.h"

namespace checknrun {
namespace {

// The memory for copies of rows that training is about to overwrite, for all shards of a rank.
struct OverflowMemory : torch::CustomClassHolder {
  OverflowMemory(at::Tensor memory, int64_t page)
      : memory_(std::move(memory)), pages(bytes_of(memory_, "memory"), memory_.numel(), page) {}

  int64_t free() { return pages.free(); }
  int64_t total() { return pages.total(); }

 private:
  at::Tensor memory_;

 public:
  Pages pages;
};

// See CopyOnWrite. Holds the memory that it points at.
struct ShardRows : torch::CustomClassHolder {
  // bits: for each tensor of marks the bits that count; -1: the marks are packed, a bit per row.
  ShardRows(int64_t rows, std::vector<at::Tensor> marks, std::vector<int64_t> bits,
            std::vector<at::Tensor> tensors, at::Tensor states, int64_t generation,
            c10::intrusive_ptr<OverflowMemory> overflow)
      : marks_(std::move(marks)), tensors_(std::move(tensors)), states_(std::move(states)),
        overflow_(std::move(overflow)),
        rows_at_cut(rows, frozen(rows, marks_, bits), parts(rows, tensors_), shared(rows, states_),
                    checked(generation), overflow_->pages) {}

  // Copies rows to memory: their ids (positions + row_start) at the first offset, the rows of
  // each tensor at its own. Positions are sorted, and all of the set within their range.
  void stage(const at::Tensor& positions, int64_t row_start, at::Tensor memory,
             std::vector<int64_t> offsets) {
    const int64_t n = positions.numel();
    const std::vector<LivePart>& live = rows_at_cut.parts();
    TORCH_CHECK_VALUE(offsets.size() == live.size() + 1, "expected an offset for ids and each of ",
                      live.size(), " tensors, not ", offsets.size());
    uint8_t* bytes = bytes_of(memory, "memory");
    const auto place = [&](int64_t offset, int64_t size) {
      TORCH_CHECK_INDEX(offset >= 0 && size <= memory.numel() - offset, size, " bytes at ", offset,
                        " of ", memory.numel());
      return bytes + offset;
    };
    uint8_t* ids = place(offsets[0], n * int64_t(sizeof(int64_t)));
    std::vector<uint8_t*> targets;
    for (size_t i = 0; i < live.size(); ++i) {
      targets.push_back(place(offsets[i + 1], n * live[i].row_bytes));
    }
    const int64_t* from = row_vector(positions, INT64_MAX);
    for (int64_t r = 0; r < n; ++r) {
      const int64_t id = from[r] + row_start;
      std::memcpy(ids + r * int64_t(sizeof(id)), &id, sizeof(id));
    }
    rows_at_cut.stage(from, n, targets.data(), false);
  }

  // Copies sorted rows of the set, which stay to be staged, to tensors: one for each of the
  // shard's.
  void sample(const at::Tensor& positions, std::vector<at::Tensor> into) {
    const int64_t n = positions.numel();
    const int64_t* from = row_vector(positions, INT64_MAX);
    const std::vector<LivePart>& live = rows_at_cut.parts();
    TORCH_CHECK_VALUE(into.size() == live.size(), "expected ", live.size(), " tensors");
    std::vector<uint8_t*> targets;
    for (size_t i = 0; i < live.size(); ++i) {
      TORCH_CHECK_VALUE(into[i].is_contiguous() && into[i].device().is_cpu() &&
                            int64_t(into[i].nbytes()) == n * live[i].row_bytes,
                        "a tensor must hold ", n, " rows of ", live[i].row_bytes, " bytes");
      targets.push_back(static_cast<uint8_t*>(into[i].mutable_data_ptr()));
    }
    TORCH_CHECK(rows_at_cut.protect(from, n, true) == n, "rows could not be copied");
    rows_at_cut.stage(from, n, targets.data(), true);
  }

  int64_t held() { return rows_at_cut.held(); }
  int64_t staged() { return rows_at_cut.staged(); }
  int64_t protected_rows() { return rows_at_cut.protected_rows(); }

  // Returns about how many rows are held in each range, given as start, stop, start, stop, …
  std::vector<int64_t> held_in(std::vector<int64_t> ranges) {
    std::vector<int64_t> held;
    for (size_t i = 0; i + 1 < ranges.size(); i += 2) {
      held.push_back(rows_at_cut.held_in(ranges[i], ranges[i + 1]));
    }
    return held;
  }

 private:
  static std::vector<FrozenMarks> frozen(int64_t rows, const std::vector<at::Tensor>& marks,
                                         const std::vector<int64_t>& bits) {
    TORCH_CHECK_VALUE(marks.size() == bits.size(), "expected bits for each tensor of marks");
    std::vector<FrozenMarks> found;
    for (size_t i = 0; i < marks.size(); ++i) {
      const bool packed = bits[i] < 0;
      TORCH_CHECK_VALUE(marks[i].numel() >= (packed ? (rows + 7) / 8 : rows), "marks of ", rows,
                        " rows are too few");
      found.push_back({bytes_of(marks[i], "marks"), uint8_t(bits[i]), packed});
    }
    return found;
  }

  static std::vector<LivePart> parts(int64_t rows, const std::vector<at::Tensor>& tensors) {
    std::vector<LivePart> found;
    for (const at::Tensor& tensor : tensors) {
      TORCH_CHECK_VALUE(tensor.dim() > 0 && tensor.size(0) == rows && tensor.is_contiguous() &&
                            tensor.device().is_cpu(),
                        "a tensor must be ", rows, " rows in one piece on the CPU");
      found.push_back({static_cast<const uint8_t*>(tensor.const_data_ptr()),
                       rows ? int64_t(tensor.nbytes()) / rows : 0});
    }
    return found;
  }

  static std::atomic<uint8_t>* shared(int64_t rows, const at::Tensor& states) {
    static_assert(sizeof(std::atomic<uint8_t>) == 1 && std::atomic<uint8_t>::is_always_lock_free);
    TORCH_CHECK_VALUE(states.numel() >= rows, "states of ", rows, " rows are too few");
    return reinterpret_cast<std::atomic<uint8_t>*>(bytes_of(states, "states"));
  }

  static uint8_t checked(int64_t generation) {
    TORCH_CHECK_VALUE(generation >= 1 && generation <= 127, "generation ", generation);
    return uint8_t(generation);
  }

  std::vector<at::Tensor> marks_, tensors_;
  at::Tensor states_;
  c10::intrusive_ptr<OverflowMemory> overflow_;

 public:
  CopyOnWrite rows_at_cut;
};

// The shards of a kernel, protected together in one call for each backward pass.
struct KernelRows : torch::CustomClassHolder {
  // Takes all shards in one call, since each call from Python costs as much as a whole shard.
  //
  // tensors: for each shard its tensors of marks, its weight and states, and the states of its
  // rows. layout: for each shard its place in the kernel (other shards of the kernel are not
  // protected), number of rows, generation, number of tensors of marks, the bits of each, and the
  // number of weight and states.
  KernelRows(std::vector<at::Tensor> tensors, std::vector<int64_t> layout,
             c10::intrusive_ptr<OverflowMemory> overflow) {
    size_t tensor = 0, at = 0;
    const auto next = [&] {
      TORCH_CHECK_VALUE(at < layout.size(), "the layout ends early");
      return layout[at++];
    };
    const auto take = [&](int64_t n) {
      TORCH_CHECK_VALUE(n >= 0 && size_t(n) <= tensors.size() - tensor, "too few tensors");
      const auto from = tensors.begin() + int64_t(tensor);
      tensor += size_t(n);
      return std::vector<at::Tensor>(from, from + n);
    };
    while (at < layout.size()) {
      const int64_t place = next(), rows = next(), generation = next(), sets = next();
      TORCH_CHECK_VALUE(place >= 0 && place < kMostShards && sets >= 0, "place ", place);
      std::vector<int64_t> bits;
      for (int64_t i = 0; i < sets; ++i) bits.push_back(next());
      std::vector<at::Tensor> marks = take(sets), live = take(next());
      if (size_t(place) >= at_.size()) at_.resize(size_t(place) + 1);
      at_[size_t(place)] = c10::make_intrusive<ShardRows>(
          rows, std::move(marks), std::move(bits), std::move(live), take(1)[0], generation, overflow);
    }
  }

  c10::intrusive_ptr<ShardRows> shard(int64_t place) {
    TORCH_CHECK_INDEX(at(place) != nullptr, "no shard at place ", place);
    return at_[size_t(place)];
  }

  void abandon() {
    for (const auto& shard : at_) {
      if (shard) shard->rows_at_cut.abandon();
    }
  }

  int64_t protected_rows() {
    int64_t rows = 0;
    for (const auto& shard : at_) rows += shard ? shard->protected_rows() : 0;
    return rows;
  }

  int64_t longest_wait_ns() {
    int64_t longest = 0;
    for (const auto& shard : at_) {
      if (shard) longest = std::max(longest, shard->rows_at_cut.longest_wait_ns());
    }
    return longest;
  }

  // Protects the rows with ids values[from:], of which those of feature i are
  // values[offsets[i]:offsets[i + 1]].
  //
  // Returns how many of the values were handled: fewer than all where memory is short.
  int64_t protect(const at::Tensor& values, std::vector<int64_t> offsets,
                  std::vector<int64_t> feature_to_shard, int64_t from) {
    const int64_t* ids = row_ids(values);
    TORCH_CHECK_VALUE(offsets.size() == feature_to_shard.size() + 1, "expected an offset more than ",
                      feature_to_shard.size(), " features");
    for (size_t i = 0; i < feature_to_shard.size(); ++i) {
      const int64_t start = std::max(offsets[i], from), stop = offsets[i + 1];
      TORCH_CHECK_INDEX(start >= 0 && stop <= values.numel(), "ids ", start, " to ", stop);
      CopyOnWrite* rows = at(feature_to_shard[i]);
      if (!rows || start >= stop) continue;
      const int64_t handled = rows->protect(ids + start, stop - start, false);
      if (handled < stop - start) return start + handled;
    }
    return values.numel();
  }

  // Protects rows of one shard, by its place in the kernel; see ``protect``.
  int64_t protect_shard(int64_t place, const at::Tensor& ids, int64_t from) {
    CopyOnWrite* rows = at(place);
    const int64_t n = ids.numel();
    if (!rows || from >= n) return n;
    return from + rows->protect(row_ids(ids) + from, n - from, false);
  }

 private:
  static constexpr int64_t kMostShards = 1 << 24;

  CopyOnWrite* at(int64_t place) const {
    if (place < 0 || size_t(place) >= at_.size() || !at_[size_t(place)]) return nullptr;
    return &at_[size_t(place)]->rows_at_cut;
  }

  static const int64_t* row_ids(const at::Tensor& ids) {
    TORCH_CHECK_VALUE(ids.dim() == 1 && ids.is_contiguous() && ids.scalar_type() == at::kLong &&
                          ids.device().is_cpu(),
                      "ids must be contiguous int64 on the CPU");
    return ids.const_data_ptr<int64_t>();
  }

  std::vector<c10::intrusive_ptr<ShardRows>> at_;
};

}  // namespace
}  // namespace checknrun

TORCH_LIBRARY_FRAGMENT(checknrun, library) {
  using namespace checknrun;
  library.class_<OverflowMemory>("OverflowMemory")
      .def(torch::init<at::Tensor, int64_t>())
      .def("free", &OverflowMemory::free)
      .def("total", &OverflowMemory::total);
  library.class_<ShardRows>("ShardRows")
      .def("stage", &ShardRows::stage)
      .def("sample", &ShardRows::sample)
      .def("held", &ShardRows::held)
      .def("held_in", &ShardRows::held_in)
      .def("staged", &ShardRows::staged)
      .def("protected_rows", &ShardRows::protected_rows);
  library.class_<KernelRows>("KernelRows")
      .def(torch::init<std::vector<at::Tensor>, std::vector<int64_t>,
                       c10::intrusive_ptr<OverflowMemory>>())
      .def("shard", &KernelRows::shard)
      .def("abandon", &KernelRows::abandon)
      .def("protected_rows", &KernelRows::protected_rows)
      .def("longest_wait_ns", &KernelRows::longest_wait_ns)
      .def("protect", &KernelRows::protect)
      .def("protect_shard", &KernelRows::protect_shard);
}

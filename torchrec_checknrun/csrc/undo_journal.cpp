// torch.classes.checknrun.StepJournal, and storages in memory that outlives the process.
#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>

#include "row_vector.h"
#include "undo_journal.h"

namespace checknrun {
namespace {

int64_t* word_of(const at::Tensor& words, int64_t at) {
  TORCH_CHECK_VALUE(words.dim() == 1 && words.is_contiguous() && words.device().is_cpu() &&
                        words.scalar_type() == at::kLong,
                    "words must be contiguous int64 on the CPU");
  TORCH_CHECK_INDEX(at >= 0 && at < words.numel(), "word ", at, " of ", words.numel());
  return words.mutable_data_ptr<int64_t>() + at;
}

void publish(const at::Tensor& words, int64_t at, int64_t value) {
  publish_word(word_of(words, at), value);
}

void store_word(const at::Tensor& words, int64_t at, int64_t value) {
  TORCH_CHECK_VALUE(fits_word(value), value, " has more than ", kValueBits, " bits");
  publish_word(word_of(words, at), int64_t(sealed_word(at, value)));
}

int64_t load_word(const at::Tensor& words, int64_t at) {
  const int64_t word = *word_of(words, at), value = word_value(uint64_t(word));
  TORCH_CHECK_VALUE(word == int64_t(sealed_word(at, value)), "word ", at, " is damaged");
  return value;
}

// Moves a tensor's storage to ``place``; every view of the storage follows. With ``keep`` the
// tensor takes the place's content, else the place takes the tensor's. The old memory is freed.
void move_storage(const at::Tensor& tensor, const at::Tensor& place, bool keep) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), "a storage on ", tensor.device(), " can't be moved");
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  uint8_t* into = bytes_of(place, "place");
  const int64_t size = int64_t(storage->nbytes());
  TORCH_CHECK_VALUE(place.numel() == size, "a place of ", place.numel(), " bytes for a storage of ",
                    size);
  if (size == 0) return;
  if (!keep) std::memcpy(into, storage->data(), size_t(size));
  auto* holder = new at::Tensor(place);
  storage->set_data_ptr_noswap(at::DataPtr(
      into, holder, [](void* held) { delete static_cast<at::Tensor*>(held); }, at::kCPU));
}

constexpr int64_t kNone = -1;  // a step: there is no journal

// The rows of all of a rank's shards, journaled by one call for each kernel and backward pass.
struct StepJournal : torch::CustomClassHolder {
  // tensors: for each shard its weight and states, then the intervals of its rows. parts: for each
  // shard the number of weight and states.
  StepJournal(std::vector<at::Tensor> tensors, std::vector<int64_t> parts)
      : tensors_(std::move(tensors)), journal_(shards(tensors_, parts)) {}

  // Begins a journal that goes back to the step in words[done], in the place of the older one, and
  // returns its place. words[from + place]: the step that a journal goes back to; words[used +
  // place]: its bytes.
  int64_t begin(const at::Tensor& words, int64_t from, int64_t used, int64_t done) {
    const int64_t place = load_word(words, from + 1) < load_word(words, from);
    const int64_t since = load_word(words, done);
    journal_.begin();
    store_word(words, from + place, kNone);
    store_word(words, used + place, 0);
    store_word(words, from + place, since);
    return place;
  }

  // Journals the rows with ids values[offsets[i]:offsets[i + 1]] of shard shards[i], behind the
  // bytes of the area that are used by words[word]; then stores those used in it.
  //
  // Returns the bytes used; if the area is too small, minus the bytes it should have: then
  // ``write`` goes on in a larger one, and nothing is written before.
  int64_t append(const at::Tensor& values, std::vector<int64_t> offsets,
                 std::vector<int64_t> shards, int64_t interval, const at::Tensor& area,
                 const at::Tensor& words, int64_t word) {
    TORCH_CHECK_VALUE(offsets.size() == shards.size() + 1, "expected an offset more than ",
                      shards.size(), " features");
    TORCH_CHECK_VALUE(values.dim() == 1 && values.is_contiguous() && values.device().is_cpu() &&
                          values.scalar_type() == at::kLong,
                      "ids must be contiguous int64 on the CPU");
    const int64_t* ids = values.const_data_ptr<int64_t>();
    for (size_t i = 0; i < shards.size(); ++i) {
      const int64_t start = offsets[i], stop = offsets[i + 1];
      TORCH_CHECK_INDEX(start >= 0 && stop <= values.numel(), "ids ", start, " to ", stop);
      TORCH_CHECK_INDEX(shards[i] >= 0 && size_t(shards[i]) < journal_.shards().size(), "shard ",
                        shards[i]);
      if (start < stop) {
        journal_.collect(size_t(shards[i]), ids + start, stop - start, uint8_t(interval));
      }
    }
    return write(area, words, word);
  }

  int64_t write(const at::Tensor& area, const at::Tensor& words, int64_t word) {
    int64_t used = load_word(words, word);
    uint8_t* bytes = bytes_of(area, "area");
    TORCH_CHECK_INDEX(used >= 0 && used <= area.numel() && used % 8 == 0, used, " bytes used of ",
                      area.numel());
    const int64_t wanted = journal_.wanted_bytes();
    if (wanted == 0) return used;
    if (wanted > area.numel() - used) return -(used + wanted);
    used += journal_.write(bytes + used);
    store_word(words, word, used);
    return used;
  }

  // Throws unless the area begins with so many bytes of a journal.
  void verify(const at::Tensor& area, int64_t used) {
    visit(area, used, [&](const uint8_t* bytes) {
      journal_.verify(bytes, used);
      return Undone();
    });
  }

  // Puts journaled rows back; returns their number, and how many of them had changed.
  std::vector<int64_t> undo(const at::Tensor& area, int64_t used, int64_t interval) {
    const Undone undone = visit(area, used, [&](const uint8_t* bytes) {
      return journal_.undo(bytes, used, uint8_t(interval));
    });
    return {undone.rows, undone.changed};
  }

 private:
  template <typename Act>
  static Undone visit(const at::Tensor& area, int64_t used, Act act) {
    const uint8_t* bytes = bytes_of(area, "area");
    TORCH_CHECK_VALUE(used >= 0 && used <= area.numel(), used, " bytes used of ", area.numel());
    try {
      return act(bytes);
    } catch (const std::invalid_argument& error) {
      TORCH_CHECK_VALUE(false, "no journal: ", error.what());
    }
  }

  static std::vector<JournaledShard> shards(const std::vector<at::Tensor>& tensors,
                                            const std::vector<int64_t>& parts) {
    std::vector<JournaledShard> found;
    size_t at = 0;
    for (const int64_t count : parts) {
      TORCH_CHECK_VALUE(count > 0 && size_t(count) < tensors.size() - at, "too few tensors");
      JournaledShard shard{tensors[at].size(0), {}, nullptr};
      for (int64_t i = 0; i < count; ++i, ++at) {
        const at::Tensor& part = tensors[at];
        TORCH_CHECK_VALUE(part.dim() > 0 && part.size(0) == shard.rows && part.is_contiguous() &&
                              part.device().is_cpu(),
                          "a tensor must be ", shard.rows, " rows in one piece on the CPU");
        shard.parts.push_back({static_cast<uint8_t*>(part.mutable_data_ptr()),
                               shard.rows ? int64_t(part.nbytes()) / shard.rows : 0});
      }
      TORCH_CHECK_VALUE(tensors[at].numel() >= shard.rows, "intervals of ", shard.rows,
                        " rows are too few");
      shard.intervals = bytes_of(tensors[at++], "intervals");
      found.push_back(std::move(shard));
    }
    return found;
  }

  std::vector<at::Tensor> tensors_;
  UndoJournal journal_;
};

}  // namespace
}  // namespace checknrun

TORCH_LIBRARY_FRAGMENT(checknrun, library) {
  using namespace checknrun;
  library.def("publish(Tensor(a!) words, int at, int value) -> ()", publish);
  library.def("store_word(Tensor(a!) words, int at, int value) -> ()", store_word);
  library.def("load_word(Tensor words, int at) -> int", load_word);
  library.def("move_storage(Tensor(a!) tensor, Tensor(b!) place, bool keep) -> ()", move_storage);
  library.class_<StepJournal>("StepJournal")
      .def(torch::init<std::vector<at::Tensor>, std::vector<int64_t>>())
      .def("begin", &StepJournal::begin)
      .def("append", &StepJournal::append)
      .def("write", &StepJournal::write)
      .def("verify", &StepJournal::verify)
      .def("undo", &StepJournal::undo);
}

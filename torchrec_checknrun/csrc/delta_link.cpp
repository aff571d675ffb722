// torch.ops.checknrun: encode rows upon what is kept of their predecessors, and keep them in turn.
#include <torch/library.h>

#include <functional>
#include <tuple>

#include "delta_host.h"
#include "row_vector.h"

namespace checknrun {
namespace {

constexpr int64_t kMostLanes = 16;  // of any build's vectors

struct OwnedPart : DeltaLinkPart {
  OwnedPart() = default;
  OwnedPart(const OwnedPart&) = delete;
  OwnedPart& operator=(const OwnedPart&) = delete;
  ~OwnedPart() {
    release(streams);
    for (Stream* each : {&freed[0], &freed[1], &moved, &moved_codes}) std::free(each->data);
  }
};

// Puts the rows back that a part has replaced, which begin at `begin`.
void put_back(const DeltaLinkJob& job, int64_t begin, int64_t done, int64_t shorts, int64_t longs) {
  const HeldRows &held = job.held, &old = job.old;
  for (int64_t r = begin; r < begin + done; ++r) {
    const int64_t at = job.positions[r];
    uint8_t* slot = held.slots + at * held.slot;
    held.forms[at] = old.forms[r];
    held.exponents[at] = old.exponents[r];
    std::memcpy(slot, old.slots + r * held.slot, size_t(held.slot));
    uint64_t place;
    std::memcpy(&place, slot, 8);
    if (old.forms[r] == kShort && place < uint64_t(held.short_rows)) {
      std::memcpy(held.shorts + place * job.dim, old.shorts + shorts++ * job.dim,
                  size_t(job.dim) * 2);
    } else if (old.forms[r] == kLong && place < uint64_t(held.long_rows)) {
      std::memcpy(held.longs + place * job.dim, old.longs + longs++ * job.dim,
                  size_t(job.dim) * 4);
    }
  }
}

// Joins a stream of all parts to a tensor of a type, with rows of so many values.
template <typename Of>
at::Tensor joined(const std::vector<OwnedPart>& parts, at::ScalarType type, int64_t values,
                  const Of& of) {
  int64_t bytes = 0;
  for (const OwnedPart& part : parts) bytes += of(part).size;
  at::Tensor found = at::empty({bytes / (values * int64_t(at::elementSize(type))), values}, type);
  uint8_t* to = static_cast<uint8_t*>(found.mutable_data_ptr());
  for (const OwnedPart& part : parts) {
    const Stream& stream = of(part);
    if (stream.size) std::memcpy(to, stream.data, size_t(stream.size));
    to += stream.size;
  }
  return found;
}

at::Tensor freed_of(const std::vector<OwnedPart>& parts, int which) {
  return joined(parts, at::kLong, 1, [&](const OwnedPart& p) -> const Stream& {
           return p.freed[which];
         }).view(-1);
}

// Counts the rows beside, by which parts know where their old ones go.
std::array<std::vector<int64_t>, 2> beside(const DeltaLinkJob& job, int64_t n, int64_t parts) {
  std::array<std::vector<int64_t>, 2> found;
  for (int which = 0; which < 2; ++which) {
    found[size_t(which)].push_back(0);
    for (int64_t part = 0; part < parts; ++part) {
      int64_t count = found[size_t(which)].back();
      for (int64_t r = n * part / parts; r < n * (part + 1) / parts; ++r) {
        count += job.held.forms[job.positions[r]] == (which ? kLong : kShort);
      }
      found[size_t(which)].push_back(count);
    }
  }
  return found;
}

using Linked = std::tuple<at::Tensor, Sizes, at::Tensor, at::Tensor, at::Tensor, at::Tensor,
                          at::Tensor, at::Tensor, int64_t, int64_t>;

Linked linked(const DeltaLinkJob& job, int64_t n, const at::Tensor& symbols,
              const std::vector<OwnedPart>& parts, const at::Tensor& old_shorts,
              const at::Tensor& old_longs) {
  uint64_t before = 0, after = 0;
  std::vector<std::reference_wrapper<const Streams>> streams;
  for (const OwnedPart& part : parts) {
    streams.emplace_back(part.streams);
    before += part.before;
    after += part.after;
  }
  const Sizes sizes = sizes_of(job.symbols, n, job.dim);
  return {join(symbols, streams, sizes),
          sizes,
          old_shorts,
          old_longs,
          freed_of(parts, 0),
          freed_of(parts, 1),
          joined(parts, at::kLong, 1,
                 [](const OwnedPart& p) -> const Stream& { return p.moved; }).view(-1),
          joined(parts, at::kInt, job.dim,
                 [](const OwnedPart& p) -> const Stream& { return p.moved_codes; }),
          int64_t(before),
          int64_t(after)};
}

Linked delta_link(const at::Tensor& positions, const at::Tensor& weight, const at::Tensor& wanted,
                  int64_t reset, int64_t row_start, int64_t first, int64_t last, at::Tensor forms,
                  at::Tensor exponents, at::Tensor slots, at::Tensor shorts, at::Tensor longs,
                  at::Tensor old_forms, at::Tensor old_exponents, at::Tensor old_slots,
                  c10::string_view build) {
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.device().is_cpu() &&
                        (weight.size(0) == 0 || weight.size(1) == 1 || weight.stride(1) == 1),
                    "expected rows on the CPU, each in one piece, not ", weight.sizes());
  TORCH_CHECK_VALUE(slots.dim() == 2 && shorts.dim() == 2 && longs.dim() == 2,
                    "slots and rows beside must have two dimensions");
  const int64_t n = weight.size(0), dim = weight.size(1), rows = slots.size(0);
  const int64_t slot = slots.size(1);
  TORCH_CHECK_VALUE(0 < dim && dim < (1 << 24) && slot >= dim && slot >= 8, "slots are too narrow");
  TORCH_CHECK_VALUE(positions.numel() == n, "expected ", n, " positions");
  const int64_t* at = row_vector(positions, rows);
  for (int64_t r = 1; r < n; ++r) {
    TORCH_CHECK_VALUE(at[r - 1] < at[r], "positions must be sorted and distinct");
  }
  std::vector<int32_t> low(static_cast<size_t>(dim + kMostLanes)), high(low.size());
  for (int64_t j = 0; j < dim; ++j) {
    const uint64_t factor = mixed(uint64_t(j)) | 1;
    low[size_t(j)] = int32_t(uint32_t(factor));
    high[size_t(j)] = int32_t(factor >> 32);
  }
  at::Tensor symbols = at::empty({n}, at::kByte);
  DeltaLinkJob job{weight.const_data_ptr(),
                   value_of(weight),
                   weight.stride(0),
                   dim,
                   memory_of<int16_t>(wanted, {n}, "wanted"),
                   int(reset),
                   at,
                   row_start,
                   mixed(uint64_t(first)),
                   mixed(uint64_t(last)) << 1,
                   low.data(),
                   high.data(),
                   {memory_of<uint8_t>(forms, {rows}, "forms"),
                    memory_of<uint8_t>(exponents, {rows}, "exponents"),
                    memory_of<uint8_t>(slots, {rows, slot}, "slots"), slot,
                    memory_of<int16_t>(shorts, {shorts.size(0), dim}, "shorts"),
                    memory_of<int32_t>(longs, {longs.size(0), dim}, "longs"), shorts.size(0),
                    longs.size(0)},
                   {memory_of<uint8_t>(old_forms, {n}, "old forms"),
                    memory_of<uint8_t>(old_exponents, {n}, "old exponents"),
                    memory_of<uint8_t>(old_slots, {n, slot}, "old slots"), slot, nullptr, nullptr, 0,
                    0},
                   symbols.mutable_data_ptr<uint8_t>()};
  const int64_t count = parts_of(n, dim);
  const auto places = beside(job, n, count);
  at::Tensor old_shorts = at::empty({places[0].back(), dim}, at::kShort);
  at::Tensor old_longs = at::empty({places[1].back(), dim}, at::kInt);
  job.old.shorts = old_shorts.mutable_data_ptr<int16_t>();
  job.old.longs = old_longs.mutable_data_ptr<int32_t>();
  std::vector<OwnedPart> parts(static_cast<size_t>(count));
  const DeltaKernels& kernels = delta_kernels_of(std::string(build));
  try {
    check(in_parts(n, count, [&](int64_t part, int64_t begin, int64_t end) {
      OwnedPart& own = parts[size_t(part)];
      own.short_at = places[0][size_t(part)];
      own.long_at = places[1][size_t(part)];
      return kernels.link(job, begin, end, own);
    }));
    return linked(job, n, symbols, parts, old_shorts, old_longs);
  } catch (...) {  // as if nothing had been asked for
    for (int64_t part = 0; part < count; ++part) {
      put_back(job, n * part / count, parts[size_t(part)].done, places[0][size_t(part)],
               places[1][size_t(part)]);
    }
    throw;
  }
}

}  // namespace
}  // namespace checknrun

TORCH_LIBRARY_FRAGMENT(checknrun, library) {
  library.def(
      "delta_link(Tensor positions, Tensor weight, Tensor wanted, int reset, int row_start, "
      "int first, int last, Tensor(a!) forms, Tensor(b!) exponents, Tensor(c!) slots, "
      "Tensor(d!) shorts, Tensor(e!) longs, Tensor(f!) old_forms, Tensor(g!) old_exponents, "
      "Tensor(h!) old_slots, str build) -> "
      "(Tensor, int[], Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, int)",
      checknrun::delta_link);
}

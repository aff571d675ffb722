// Packs and unpacks rows a batch at a time, those of a class one after the other: a class that
// changes from row to row is a branch that no processor predicts, and each wrong guess takes as
// long as packing a short row. Included once for each instruction set.
namespace checknrun {
namespace CHECKNRUN_NAMESPACE {
namespace {

constexpr int64_t kMostBatch = 64;

// Returns how many rows of codes stay in the nearest cache, beside as many of their predecessors.
inline int64_t batch_rows(int64_t dim) {
  return std::min<int64_t>(std::max<int64_t>(2048 / dim, 1), kMostBatch);
}

// Rows as zigzag codes, with their classes.
struct Batch {
  explicit Batch(int64_t of_dim)
      : dim(of_dim), stride(padded(of_dim)), most(batch_rows(of_dim)), z(most * stride + kStep) {
    memset(z.data, 0, (most * stride + kStep) * sizeof(int32_t));
  }

  int32_t* row(int64_t i) const { return z.data + i * stride; }

  // Sorts the first n rows by class, those of a class in their order.
  void sort(int64_t n) {
    present = 0;
    for (int64_t i = 0; i < n; ++i) {
      const int c = classes[i];
      last[c] = present >> c & 1 ? last[c] + 1 : 1;  // counts, so far
      present |= 1u << c;
    }
    int64_t at = 0;
    for (uint32_t left = present; left; left &= left - 1) {
      const int c = __builtin_ctz(left);
      const int64_t count = last[c];
      first[c] = last[c] = at;
      at += count;
    }
    for (int64_t i = 0; i < n; ++i) order[last[classes[i]]++] = uint8_t(i);
  }

  const int64_t dim, stride, most;
  const Buffer<int32_t> z;  // each row is padded with zeros
  uint8_t classes[kMostBatch];
  uint8_t order[kMostBatch];  // of rows, by class
  uint32_t present = 0;       // a bit for each class that there is
  int64_t first[kClasses], last[kClasses];  // in `order`, half-open, of the classes that there are
};

template <int width>
inline void pack_rows(const Batch& batch, int c, Plane plane, uint8_t* out) {
  const int32_t mask = (1 << plane.bits) - 1;
  const int64_t bytes = plane_bytes(batch.dim, width);
  for (int64_t i = batch.first[c]; i < batch.last[c]; ++i, out += bytes) {
    pack_row<width>(batch.row(batch.order[i]), batch.dim, plane.low, mask, out);
  }
}

// Appends the planes of the first n rows.
inline void write_planes(Batch& batch, int64_t n, Streams& out) {
  batch.sort(n);
  for (uint32_t left = batch.present; left; left &= left - 1) {
    const int c = __builtin_ctz(left);  // class 0 has no planes
    const int64_t rows = batch.last[c] - batch.first[c];
    for (int p = 0; p < kPlanes.count[c]; ++p) {
      const Plane plane = kPlanes.of[c][p];
      uint8_t* to = append(out.planes[c][p], rows * plane_bytes(batch.dim, plane.width));
      switch (plane.width) {
        case 8: pack_rows<8>(batch, c, plane, to); break;
        case 4: pack_rows<4>(batch, c, plane, to); break;
        case 2: pack_rows<2>(batch, c, plane, to); break;
        default: pack_rows<1>(batch, c, plane, to);
      }
    }
  }
}

template <int width, bool begins>
inline void unpack_rows(const Batch& batch, int c, Plane plane, const uint8_t* from,
                        const int64_t* places) {
  const int32_t mask = (1 << plane.bits) - 1;
  const int64_t bytes = plane_bytes(batch.dim, width);
  for (int64_t i = batch.first[c]; i < batch.last[c]; ++i) {
    const uint8_t row = batch.order[i];
    unpack_row<width, begins>(from + places[row] * bytes, batch.dim, plane.low, mask,
                              batch.row(row));
  }
}

template <bool begins>
inline void unpack_rows(const Batch& batch, int c, Plane plane, const uint8_t* from,
                        const int64_t* places) {
  switch (plane.width) {
    case 8: return unpack_rows<8, begins>(batch, c, plane, from, places);
    case 4: return unpack_rows<4, begins>(batch, c, plane, from, places);
    case 2: return unpack_rows<2, begins>(batch, c, plane, from, places);
    default: return unpack_rows<1, begins>(batch, c, plane, from, places);
  }
}

// Reads the planes of the first n rows; `places` are their places among the rows of their class.
inline void read_planes(Batch& batch, int64_t n, const uint8_t* const (*planes)[4],
                        const int64_t* places) {
  batch.sort(n);
  for (uint32_t left = batch.present; left; left &= left - 1) {
    const int c = __builtin_ctz(left);
    if (c == 0) {
      for (int64_t i = batch.first[c]; i < batch.last[c]; ++i) {
        memset(batch.row(batch.order[i]), 0, batch.stride * sizeof(int32_t));
      }
      continue;
    }
    unpack_rows<true>(batch, c, kPlanes.of[c][0], planes[c][0], places);
    for (int p = 1; p < kPlanes.count[c]; ++p) {
      unpack_rows<false>(batch, c, kPlanes.of[c][p], planes[c][p], places);
    }
  }
}

}  // namespace
}  // namespace CHECKNRUN_NAMESPACE
}  // namespace checknrun

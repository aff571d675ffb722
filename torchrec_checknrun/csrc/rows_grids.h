// The scale and bias of a row: the methods of codecs/base.py, one row per lane. Included once for
// each instruction set, after rows_lanes.h.
namespace checknrun {
namespace CHECKNRUN_NAMESPACE {
namespace {

struct Grid {
  Floats bias, scale;
};

// Returns the squared errors of N grids (bias, scale), for ranking only: as if bias and scale were
// not rounded when stored.
template <int N>
inline void grid_errors(const Floats* x, int64_t dim, const Floats* bias, const Floats* scale,
                        Floats top, Floats* error) {
  Floats inverse[N], offset[N], even[N], odd[N];
  for (int c = 0; c < N; ++c) {
    inverse[c] = choose(scale[c] > 0, 1.f / scale[c], all(1.f));
    offset[c] = -bias[c] * inverse[c];
    even[c] = odd[c] = Floats{};
  }
  int64_t d = 0;
  for (; d + 1 < dim; d += 2) {
    for (int c = 0; c < N; ++c) {
      const Floats t = x[d] * inverse[c] + offset[c];
      const Floats u = x[d + 1] * inverse[c] + offset[c];
      const Floats e = t - nearest(lower(higher(t, Floats{}), top));
      const Floats f = u - nearest(lower(higher(u, Floats{}), top));
      even[c] += e * e;
      odd[c] += f * f;
    }
  }
  if (d < dim) {
    for (int c = 0; c < N; ++c) {
      const Floats t = x[d] * inverse[c] + offset[c];
      const Floats e = t - nearest(lower(higher(t, Floats{}), top));
      even[c] += e * e;
    }
  }
  for (int c = 0; c < N; ++c) error[c] = (even[c] + odd[c]) * scale[c] * scale[c];
}

inline Grid greedy_search(const Floats* x, int64_t dim, Floats low, Floats high, Floats top,
                          int num_bins, float ratio) {
  const Floats step = (high - low) / float(num_bins);
  Grid best{low, (high - low) / top};
  Floats least;
  grid_errors<1>(x, dim, &best.bias, &best.scale, top, &least);
  const int moves = int(ratio * float(num_bins));
  for (int move = 0; move < moves; ++move) {
    const Floats scale = (high - low - step) / top;
    const Floats bias[2] = {low + step, low}, scales[2] = {scale, scale};
    Floats error[2];
    grid_errors<2>(x, dim, bias, scales, top, error);
    const Ints raise = error[0] < error[1];
    low = choose(raise, low + step, low);
    high = choose(raise, high, high - step);
    const Floats smaller = lower(error[0], error[1]);
    const Ints better = (smaller < least) & (scale > 0);
    least = choose(better, smaller, least);
    best = {choose(better, low, best.bias), choose(better, scale, best.scale)};
  }
  return best;
}

// Returns the squared error of a grid exactly as it will be encoded and decoded.
inline Floats stored_error(const Floats* x, int64_t dim, Grid grid, Floats top) {
  const Floats inverse = 1.f / grid.scale;
  Floats error[2] = {};
  for (int64_t d = 0; d < dim; ++d) {
    const Floats t = (x[d] - grid.bias) * inverse;
    const Floats code = nearest(lower(higher(t, Floats{}), top));
    const Floats e = x[d] - (code * grid.scale + grid.bias);
    error[d & 1] += e * e;
  }
  return error[0] + error[1];
}

// Refits each of N grids to its own codes (least squares) and keeps the best so far. `x` has mean
// zero; `gain` is the reduction of the squared error that the best grid achieves.
template <int N>
inline void fit_best(const Floats* x, int64_t dim, const Grid* grids, Floats top, Grid& best,
                     Floats& gain) {
  Floats inverse[N], offset[N], sum[N], squares[N], products[N];
  for (int c = 0; c < N; ++c) {
    inverse[c] = 1.f / grids[c].scale;
    offset[c] = -grids[c].bias * inverse[c];
    sum[c] = squares[c] = products[c] = Floats{};
  }
  for (int64_t d = 0; d < dim; ++d) {
    for (int c = 0; c < N; ++c) {
      const Floats t = x[d] * inverse[c] + offset[c];
      const Floats code = nearest(lower(higher(t, Floats{}), top));
      sum[c] += code;
      squares[c] += code * code;
      products[c] += code * x[d];
    }
  }
  for (int c = 0; c < N; ++c) {
    const Floats mean = sum[c] / float(dim);
    const Floats variance = squares[c] - sum[c] * mean;
    const Floats scale = products[c] / variance;
    const Floats gained = products[c] * scale;
    const Ints better = (variance > 1e-3f) & (scale > 0) & (gained > gain);
    gain = choose(better, gained, gain);
    best = {choose(better, -scale * mean, best.bias), choose(better, scale, best.scale)};
  }
}

// The adaptive search: starts from a cut range, then moves either end by a part of a step, twice.
inline Grid range_search(const Floats* x, int64_t dim, Floats low, Floats high, Floats top,
                         int bits) {
  static const float cuts[5] = {0, 0, .18f, .08f, .02f};
  const Floats range = high - low;
  const float cut = cuts[bits];
  Grid best{low + cut * range, range * (1.f - 2.f * cut) / top};
  Floats gain = {};
  const Grid start = best;
  fit_best<1>(x, dim, &start, top, best, gain);
  for (const float move : {.4f, .2f}) {
    const Floats by = move * best.scale, wider = best.scale + by / top,
                 narrower = best.scale - by / top;
    const Grid moved[4] = {{best.bias + by, narrower},
                           {best.bias - by, wider},
                           {best.bias, wider},
                           {best.bias, narrower}};
    fit_best<4>(x, dim, moved, top, best, gain);
  }
  return best;
}

// FBGEMM's grid, equal to the bit.
inline Grid min_max_grid(Floats low, Floats high, Floats top) {
  const Floats bias = round_to_half(low);
  const Floats range = high - bias;
  Floats scale = round_to_half(choose(range == 0, all(1.f), range / top));
  scale = choose(scale == 0, all(1.f), scale);
  return {bias, scale};
}

inline Grid min_max_grid8(Floats low, Floats high) { return {low, (high - low) / 255.f}; }

// The bias is -scale * top / 2, exact since the scale keeps fewer bits; so a decoded row is encoded
// to the same bytes again. Zero lies between two codes, but a row of zeros stays zero.
inline Grid symmetric_grid(Floats low, Floats high, Floats top, int bits) {
  const Floats most = higher(magnitude(low), magnitude(high));
  Floats scale = 2.f * most / top;
  const int dropped = bits == 8 ? 8 : 13 + bits;
  const Ints half = ((Ints)scale >> dropped & 1) + ((1 << (dropped - 1)) - 1);
  scale = (Floats)(((Ints)scale + half) & -(1 << dropped));
  if (bits < 8) {
    const Floats coarser = (scale + 1.5f) - 1.5f;  // subnormal halves that can be halved
    scale = round_to_half(choose(scale < 6.103515625e-5f, coarser, scale));
  }
  const Ints zero = scale == 0;
  return {choose(zero, Floats{}, -(scale * (top * 0.5f))), choose(zero, all(1.f), scale)};
}

inline Grid find_grid(const EncodeJob& job, const Floats* x, Floats* centred, Floats low,
                      Floats high, Floats mean) {
  const Floats top = all(float((1 << job.bits) - 1));
  if (job.method == Method::symmetric) return symmetric_grid(low, high, top, job.bits);
  if (job.bits == 8 && !job.half_scale) return min_max_grid8(low, high);
  const Grid plain = min_max_grid(low, high, top);
  if (job.method == Method::asymmetric) return plain;
  Grid found;
  if (job.method == Method::greedy) {
    found = greedy_search(x, job.dim, low, high, top, job.num_bins, job.ratio);
  } else {
    for (int64_t d = 0; d < job.dim; ++d) centred[d] = x[d] - mean;
    found = range_search(centred, job.dim, low - mean, high - mean, top, job.bits);
    found.bias += mean;
  }
  const Floats scale = round_to_half(found.scale);
  const Ints usable = scale > 0;
  found = {round_to_half(found.bias), choose(usable, scale, all(1.f))};
  // Both end codes must be in use: then a decoded row's own extremes give the same grid again.
  const Floats inverse = 1.f / found.scale;
  const Ints reached =
      ((low - found.bias) * inverse < 0.5f) & ((high - found.bias) * inverse > top - 0.5f);
  const Floats error = stored_error(x, job.dim, found, top);
  const Floats plain_error = stored_error(x, job.dim, plain, top);
  const Ints better = usable & reached & (error < plain_error * 0.99999f);
  return {choose(better, found.bias, plain.bias), choose(better, found.scale, plain.scale)};
}

}  // namespace
}  // namespace CHECKNRUN_NAMESPACE
}  // namespace checknrun

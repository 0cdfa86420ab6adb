// The arithmetic of attention: queries against one tile of keys.
//
// The keys of a request are cut into tiles of TILE positions, counted from position 0. A query's share of a tile is
//     m = max s_j,  p_j = exp(s_j - m),  l = sum p_j,  a = sum p_j v_j   over the keys j of the tile that it sees,
// and its tiles are folded from left to right into one state (m, l, a). Every step of that is a function of the query and of the
// tile alone: it does not matter which queries are computed together, how many threads there are, or whether a tile was read for one
// request or for many. So decoding, prefilling in any chunks and sharing of prefixes give the same bits.
//
// Legend: n queries of a block, D head dim, P = D rounded up to whole vectors.
#ifndef BANYAN_ATTEND_H
#define BANYAN_ATTEND_H

#include <algorithm>

#include "attention.h"
#include "vec.h"

namespace bny {

constexpr int TILE = 64;
constexpr float kNothing = -1e30f;  // m of a state that has seen no key

// Rows of K and V where they lie, which E reads.
struct Tile {
  const void* k[TILE];
  const void* v[TILE];
  float k_scale[TILE], v_scale[TILE];  // of int8
  int lo, hi;                          // keys that are there
};

// VL values of a row from value d on.
struct Float32 {
  BNY_INLINE vf load(const void* row, int d, float) { return vf_load((const float*)row + d); }
};
struct Bfloat16 {
  BNY_INLINE vf load(const void* row, int d, float) { return vf_from_bf16((const uint16_t*)row + d); }
};
struct Int8 {
  BNY_INLINE vf load(const void* row, int d, float scale) { return vf_mul(vf_from_i8((const int8_t*)row + d), vf_set1(scale)); }
};

// State of one query: m, l, then a[P].
static inline int64_t state_size(int P) { return P + VL; }
static inline void clear_state(float* s, int P) {
  memset(s, 0, sizeof(float) * state_size(P));
  s[0] = kNothing;
}

// Fold b into a.
static inline void fold_state(float* a, const float* b, int P) {
  const float m = std::max(b[0], a[0]);
  const float x = exp1(a[0] - m), y = exp1(b[0] - m);
  a[0] = m;
  a[1] = std::fma(b[1], y, a[1] * x);
  for (int d = VL; d < VL + P; d += VL) vf_store(a + d, vf_fma(vf_load(b + d), vf_set1(y), vf_mul(vf_load(a + d), vf_set1(x))));
}

static inline void finish_state(const float* s, float* out, int D, int P) {
  const float inverse = 1.0f / s[1];
  if (D == P) {
    for (int d = 0; d < D; d += VL) vf_store(out + d, vf_mul(vf_load(s + VL + d), vf_set1(inverse)));
  } else {
    for (int d = 0; d < D; d++) out[d] = s[VL + d] * inverse;
  }
}

// Rows to be read after this tile: fetched bit by bit while it is computed, since the hardware cannot foresee scattered slots.
struct Ahead {
  const int32_t* slots;
  int count = 0;  // of slots
  const char* base[2];    // of K and V, from the first head that is read
  const float* scale[2];  // of int8, else NULL
  int64_t stride, scale_stride;
  int bytes;  // of a row
  int first[2], next[2], end[2];  // places in slots: of this share, those that are fetched

  // What follows is about part i of n of the rows.
  void share(int i, int n) {
    for (int kv = 0; kv < 2; kv++) first[kv] = next[kv] = count * i / n, end[kv] = count * (i + 1) / n;
  }
  // Of K (0) or V (1) so many TILE-ths of the share.
  void fetch(int kv, int done) {
    for (const int until = first[kv] + ((end[kv] - first[kv]) * done + TILE - 1) / TILE; next[kv] < until; next[kv]++) {
      const char* row = base[kv] + slots[next[kv]] * stride;
      for (int i = 0; i < bytes; i += LINE) __builtin_prefetch(row + i, 0, 2);
      if (scale[kv]) __builtin_prefetch(scale[kv] + slots[next[kv]] * scale_stride, 0, 2);
    }
  }
};

// s[r * TILE + j] = q_r . k_j for R queries and N keys.
template <int R, int N, class E>
static inline void dot_block(const float* q, const void* const* k, const float* scale, float* s, int P) {
  vf acc[R][N];
  for (int r = 0; r < R; r++)
    for (int j = 0; j < N; j++) acc[r][j] = vf_zero();
  for (int d = 0; d < P; d += VL) {
    vf x[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) x[r] = vf_load(q + r * P + d);
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) {
      const vf y = E::load(k[j], d, scale[j]);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) acc[r][j] = vf_fma(x[r], y, acc[r][j]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    for (int j = 0; j < N; j += 4) vf_store_sum4(s + r * TILE + j, acc[r][j], acc[r][j + 1], acc[r][j + 2], acc[r][j + 3]);
}

template <int R, class E>
static void scores(const float* q, const Tile& tile, Ahead& ahead, float* s, int P) {
  constexpr int N = R == 1 ? 8 : 4;
  int j = tile.lo;
  for (; j + N <= tile.hi; j += N) {
    ahead.fetch(0, j + N);
    dot_block<R, N, E>(q, tile.k + j, tile.k_scale + j, s + j, P);
  }
  ahead.fetch(0, TILE);
  if (j < tile.hi) {
    const void* k[N];
    float scale[N], rest[R * TILE];
    for (int i = 0; i < N; i++) k[i] = tile.k[std::min(j + i, tile.hi - 1)], scale[i] = tile.k_scale[std::min(j + i, tile.hi - 1)];
    dot_block<R, N, E>(q, k, scale, rest, P);
    for (int r = 0; r < R; r++)
      for (int i = 0; j + i < tile.hi; i++) s[r * TILE + j + i] = rest[r * TILE + i];
  }
}

// acc_ri += p_rj * v_j[d0 + i] over the keys [begin, end).
template <int R, int N, class E>
BNY_INLINE void mix_keys(const float* p, const Tile& tile, int begin, int end, int d0, vf (&acc)[R][N]) {
#pragma GCC unroll 1
  for (int j = begin; j < end; j++) {
    vf weight[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) weight[r] = vf_set1(p[r * TILE + j]);
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
      const vf value = E::load(tile.v[j], d0 + i * VL, tile.v_scale[j]);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) acc[r][i] = vf_fma(weight[r], value, acc[r][i]);
    }
  }
}

// a_r = a_r * x_r + (sum_j p_rj v_j) * y_r over N vectors of R states.
template <int R, int N, class E>
static inline void mix_block(
  const float* p, const Tile& tile, Ahead& ahead, float* states, int64_t stride, const float* x, const float* y, int d0, int P) {
  constexpr int KEYS = 8;
  vf acc[R][N];
  for (int r = 0; r < R; r++)
    for (int i = 0; i < N; i++) acc[r][i] = vf_zero();
  const int fetched = d0 * TILE / P, more = N * VL * TILE / P;
  int j = tile.lo;
  for (; j + KEYS <= tile.hi; j += KEYS) {
    ahead.fetch(1, fetched + (j + KEYS) * more / TILE);
    mix_keys<R, N, E>(p, tile, j, j + KEYS, d0, acc);
  }
  mix_keys<R, N, E>(p, tile, j, tile.hi, d0, acc);
  for (int r = 0; r < R; r++)
    for (int i = 0; i < N; i++) {
      float* a = states + r * stride + VL + d0 + i * VL;
      vf_store(a, vf_fma(acc[r][i], vf_set1(y[r]), vf_mul(vf_load(a), vf_set1(x[r]))));
    }
}

template <int R, class E>
static void mix(const float* p, const Tile& tile, Ahead& ahead, float* states, const float* x, const float* y, int P) {
  constexpr int N = R == 1 ? 8 : 4;
  const int64_t stride = state_size(P);
  int d = 0;
  for (; d + N * VL <= P; d += N * VL) mix_block<R, N, E>(p, tile, ahead, states, stride, x, y, d, P);
  if (d + 4 * VL <= P) mix_block<R, 4, E>(p, tile, ahead, states, stride, x, y, d, P), d += 4 * VL;
  if (d + 2 * VL <= P) mix_block<R, 2, E>(p, tile, ahead, states, stride, x, y, d, P), d += 2 * VL;
  if (d < P) mix_block<R, 1, E>(p, tile, ahead, states, stride, x, y, d, P);
  ahead.fetch(1, TILE);
}

// What a score is multiplied by before its exp: a capped one has its scale in it.
BNY_INLINE float score_factor(const bny_kv& kv) { return kv.soft_cap > 0 ? 1.0f : kv.scale; }

// The vectors of a tile that hold a key of [lo, hi).
struct Span {
  int begin, end;
  Span(int lo, int hi) : begin(lo / VL * VL), end(hi <= lo ? begin : (hi + VL - 1) / VL * VL) {}
};

// Caps the scores of one query where there is a cap, and makes those of keys outside [lo, hi) -inf. Returns m, kNothing where no key
// is seen.
static inline float greatest(float* s, int lo, int hi, const bny_kv& kv) {
  const Span span(lo, hi);
  if (span.begin == span.end) return kNothing;
  if (kv.soft_cap > 0)
    for (int j = span.begin; j < span.end; j += VL) {
      const vf value = vf_div(vf_mul(vf_load(s + j), vf_set1(kv.scale)), vf_set1(kv.soft_cap));
      vf_store(s + j, vf_mul(vf_tanh(value), vf_set1(kv.soft_cap)));
    }
  for (int i = span.begin; i < lo; i++) s[i] = -kInf;
  for (int i = hi; i < span.end; i++) s[i] = -kInf;
  vf top = vf_load(s + span.begin);
  for (int j = span.begin + VL; j < span.end; j += VL) top = vf_max(top, vf_load(s + j));
  return vf_hmax(top) * score_factor(kv);
}

// The weights p in the place of the scores, 0 where nothing is seen; returns l of the tile.
static inline float weights_of(float* s, int lo, int hi, const bny_kv& kv, float m) {
  const Span span(lo, hi);
  const vf factor = vf_set1(score_factor(kv)), minus = vf_set1(-m);
  vf sum = vf_zero();
  for (int j = 0; j < std::min(span.begin, TILE); j += VL) vf_store(s + j, vf_zero());
  for (int j = span.begin; j < span.end; j += VL) {
    const vf p = vf_exp_negative(vf_fma(vf_load(s + j), factor, minus));
    vf_store(s + j, p);
    sum = vf_add(sum, p);
  }
  for (int j = span.end; j < TILE; j += VL) vf_store(s + j, vf_zero());
  return vf_sum(sum);
}

// Both for R queries, and folds m and l; x and y are the factors of the old a and of the new one.
template <int R>
static inline void weigh(float* s, const int* lo, const int* hi, const bny_kv& kv, float* states, int P, float* x, float* y) {
  constexpr int LANES = (2 * R + VL - 1) / VL * VL;
  const int64_t size = state_size(P);
  float m[R], factors[LANES] = {};
  for (int r = 0; r < R; r++) {
    float* state = states + r * size;
    m[r] = greatest(s + r * TILE, lo[r], hi[r], kv);
    const float both = std::max(state[0], m[r]);
    factors[r] = state[0] - both, factors[R + r] = m[r] - both;
    state[0] = both;
  }
  for (int i = 0; i < LANES; i += VL) vf_store(factors + i, vf_exp(vf_load(factors + i)));
  for (int r = 0; r < R; r++) {
    float* l = states + r * size + 1;
    x[r] = factors[r], y[r] = factors[R + r];
    *l = std::fma(weights_of(s + r * TILE, lo[r], hi[r], kv, m[r]), y[r], *l * x[r]);
  }
}

template <int R, class E>
static void attend_rows(
  const float* q, const Tile& tile, Ahead& ahead, const int* lo, const int* hi, const bny_kv& kv, float* states, int P) {
  float s[R * TILE], x[R], y[R];
  scores<R, E>(q, tile, ahead, s, P);
  weigh<R>(s, lo, hi, kv, states, P, x, y);
  mix<R, E>(s, tile, ahead, states, x, y, P);
}

#if defined(BNY_AVX512)
constexpr int MOST_ROWS = 6;
#else
constexpr int MOST_ROWS = 3;
#endif

// Fold a tile into the states of n queries. q is [n, P]; query i sees the keys [lo[i], hi[i]) of the tile, perhaps none.
template <class E>
static void attend(
  const float* q, int n, const Tile& tile, Ahead& ahead, const int* lo, const int* hi, const bny_kv& kv, float* states, int P) {
  for (int i = 0, size; i < n; i += size) {
    const int left = n - i;
    float* state = states + i * state_size(P);
    size = left >= MOST_ROWS ? MOST_ROWS : left == 5 ? 4 : left;
    switch (size) {
      case 1: attend_rows<1, E>(q + i * P, tile, ahead, lo + i, hi + i, kv, state, P); break;
      case 2: attend_rows<2, E>(q + i * P, tile, ahead, lo + i, hi + i, kv, state, P); break;
      case 3: attend_rows<3, E>(q + i * P, tile, ahead, lo + i, hi + i, kv, state, P); break;
      case 4: if constexpr (MOST_ROWS > 3) attend_rows<4, E>(q + i * P, tile, ahead, lo + i, hi + i, kv, state, P); break;
      default: if constexpr (MOST_ROWS > 3) attend_rows<6, E>(q + i * P, tile, ahead, lo + i, hi + i, kv, state, P); break;
    }
  }
}

}  // namespace bny

#endif

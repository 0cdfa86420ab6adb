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

struct Tile {
  const float* k[TILE];
  const float* v[TILE];
  int lo, hi;  // keys that are there
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
  const char* k[TILE];
  const char* v[TILE];
  int count;  // rows
  int bytes;  // of a row

  void fetch(const char* const* rows, int j, int end) const {
    for (end = std::min(end, count); j < end; j++)
      for (int i = 0; i < bytes; i += 64) __builtin_prefetch(rows[j] + i, 0, 3);
  }
};

// s[r * TILE + j] = q_r . k_j for R queries and N keys.
template <int R, int N>
static inline void dot_block(const float* q, const float* const* k, float* s, int P) {
  vf acc[R][N];
  for (int r = 0; r < R; r++)
    for (int j = 0; j < N; j++) acc[r][j] = vf_zero();
  for (int d = 0; d < P; d += VL) {
    vf x[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) x[r] = vf_load(q + r * P + d);
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) {
      const vf y = vf_load(k[j] + d);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) acc[r][j] = vf_fma(x[r], y, acc[r][j]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    for (int j = 0; j < N; j += 4) vf_store_sum4(s + r * TILE + j, acc[r][j], acc[r][j + 1], acc[r][j + 2], acc[r][j + 3]);
}

template <int R>
static void scores(const float* q, const Tile& tile, const Ahead* ahead, float* s, int P) {
  constexpr int N = R == 1 ? 8 : 4;
  int j = tile.lo;
  for (; j + N <= tile.hi; j += N) {
    if (ahead) ahead->fetch(ahead->k, j, j + N);
    dot_block<R, N>(q, tile.k + j, s + j, P);
  }
  if (j < tile.hi) {
    const float* k[N];
    float rest[R * TILE];
    for (int i = 0; i < N; i++) k[i] = tile.k[std::min(j + i, tile.hi - 1)];
    dot_block<R, N>(q, k, rest, P);
    for (int r = 0; r < R; r++)
      for (int i = 0; j + i < tile.hi; i++) s[r * TILE + j + i] = rest[r * TILE + i];
  }
}

// a_r = a_r * x_r + (sum_j p_rj v_j) * y_r over N vectors of R states.
template <int R, int N>
static inline void mix_block(const float* p, const Tile& tile, float* states, int64_t stride, const float* x, const float* y, int d0) {
  vf acc[R][N];
  for (int r = 0; r < R; r++)
    for (int i = 0; i < N; i++) acc[r][i] = vf_zero();
  for (int j = tile.lo; j < tile.hi; j++) {
    const float* v = tile.v[j] + d0;
    vf weight[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) weight[r] = vf_set1(p[r * TILE + j]);
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
      const vf value = vf_load(v + i * VL);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) acc[r][i] = vf_fma(weight[r], value, acc[r][i]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < N; i++) {
      float* a = states + r * stride + VL + d0 + i * VL;
      vf_store(a, vf_fma(acc[r][i], vf_set1(y[r]), vf_mul(vf_load(a), vf_set1(x[r]))));
    }
}

template <int R>
static void mix(const float* p, const Tile& tile, const Ahead* ahead, float* states, const float* x, const float* y, int P) {
  constexpr int N = R == 1 ? 8 : 4;
  if (ahead) ahead->fetch(ahead->v, 0, TILE);
  const int64_t stride = state_size(P);
  int d = 0;
  for (; d + N * VL <= P; d += N * VL) mix_block<R, N>(p, tile, states, stride, x, y, d);
  if (d + 4 * VL <= P) mix_block<R, 4>(p, tile, states, stride, x, y, d), d += 4 * VL;
  if (d + 2 * VL <= P) mix_block<R, 2>(p, tile, states, stride, x, y, d), d += 2 * VL;
  if (d < P) mix_block<R, 1>(p, tile, states, stride, x, y, d);
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

// Both, and folds m and l; x and y are the factors of the old a and of the new one.
static inline void weigh(float* s, int lo, int hi, const bny_kv& kv, float* state, float* x, float* y) {
  const float m = greatest(s, lo, hi, kv), total = weights_of(s, lo, hi, kv, m), both = std::max(state[0], m);
  *x = exp1(state[0] - both), *y = exp1(m - both);
  state[0] = both;
  state[1] = std::fma(total, *y, state[1] * *x);
}

template <int R>
static void attend_rows(
  const float* q, const Tile& tile, const Ahead* ahead, const int* lo, const int* hi, const bny_kv& kv, float* states, int P) {
  float s[R * TILE], x[R], y[R];
  scores<R>(q, tile, ahead, s, P);
  for (int r = 0; r < R; r++) weigh(s + r * TILE, lo[r], hi[r], kv, states + r * state_size(P), x + r, y + r);
  mix<R>(s, tile, ahead, states, x, y, P);
}

// Fold a tile into the states of n queries. q is [n, P]; query i sees the keys [lo[i], hi[i]) of the tile, perhaps none.
static inline void attend(
  const float* q, int n, const Tile& tile, const Ahead* ahead, const int* lo, const int* hi, const bny_kv& kv, float* states, int P) {
  for (int i = 0; i < n; ahead = nullptr) {
    float* state = states + i * state_size(P);
    const int left = n - i;
#if defined(BNY_AVX512)
    if (left >= 6) {
      attend_rows<6>(q + i * P, tile, ahead, lo + i, hi + i, kv, state, P), i += 6;
      continue;
    }
    if (left >= 4) {
      attend_rows<4>(q + i * P, tile, ahead, lo + i, hi + i, kv, state, P), i += 4;
      continue;
    }
#endif
    switch (left) {
      case 1: attend_rows<1>(q + i * P, tile, ahead, lo + i, hi + i, kv, state, P), i += 1; break;
      case 2: attend_rows<2>(q + i * P, tile, ahead, lo + i, hi + i, kv, state, P), i += 2; break;
      default: attend_rows<3>(q + i * P, tile, ahead, lo + i, hi + i, kv, state, P), i += 3; break;
    }
  }
}

}  // namespace bny

#endif

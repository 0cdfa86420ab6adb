// Many queries against one tile of keys: the arithmetic of attend.h as two matrix products, with the same bits.
//
// attend.h adds up a score in the VL lanes of a vector, over every VL-th value of the head, and then the lanes as a tree. Here a lane is
// a key: K lies transposed, and each class of every VL-th value is a chain of its own, met by the others in the order of that tree. The
// weights times V are the same chain over ascending keys in both.
#ifndef BANYAN_ATTEND_MANY_H
#define BANYAN_ATTEND_MANY_H

#include "attend.h"

namespace bny {

#if defined(BNY_AVX512)
constexpr int MANY = 8;    // queries of a block in registers
constexpr int ROUND = 16;  // attend_many takes a multiple of so many: of MANY and of VL
constexpr int kOrder[VL] = {0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15};  // the leaves of vf_store_sum4's tree
#elif defined(__AVX2__)
constexpr int MANY = 6;
constexpr int ROUND = 24;
constexpr int kOrder[VL] = {0, 1, 2, 3, 4, 5, 6, 7};
#else
constexpr int MANY = 6;
constexpr int ROUND = 12;
constexpr int kOrder[VL] = {0, 2, 1, 3};
#endif
constexpr int PANEL = 2 * VL;        // keys that are multiplied at once
constexpr int PANELS = TILE / PANEL;

// A tile as matrices: kt [PANELS][P][PANEL], v [TILE][P]; rows of keys outside [lo, hi) are zeros.
struct DenseTile {
  const float* kt;
  const float* v;
};

// What a block of MANY queries sees at most.
struct Seen {
  int lo, hi;
};

// Rows r of VL floats each become columns.
#if defined(__AVX2__) && !defined(BNY_AVX512)
BNY_INLINE void transpose(const float* const* rows, int at, float* out, int64_t stride) {
  __m256 r[8], t[8];
  for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(rows[i] + at);
  for (int i = 0; i < 4; i++) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; i++) {
    r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    _mm256_storeu_ps(out + i * stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(out + (i + 4) * stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}
#else
BNY_INLINE void transpose(const float* const* rows, int at, float* out, int64_t stride) {
  for (int d = 0; d < VL; d++)
    for (int i = 0; i < VL; i++) out[d * stride + i] = rows[i][at + d];
}
#endif

// kt of the rows of a tile, all of which are there.
static inline void transpose_tile(const float* const* rows, float* kt, int P) {
  for (int j = 0; j < TILE; j += VL) {
    float* panel = kt + (int64_t)(j / PANEL) * P * PANEL + j % PANEL;
    for (int d = 0; d < P; d += VL) transpose(rows + j, d, panel + (int64_t)d * PANEL, PANEL);
  }
}

// acc_r += q_r[d] * kt[d] over the class of d, of which there are STEPS if that is not 0.
template <int STEPS>
BNY_INLINE void add_class(const float* q, const float* kt, int d, int P, vf (&acc)[MANY][2]) {
  const int steps = STEPS ? STEPS : P / VL;
  q += d, kt += d * PANEL;
#pragma GCC unroll 8
  for (int i = 0; i < steps; i++, q += VL, kt += VL * PANEL) {
    const vf a = vf_load(kt), b = vf_load(kt + VL);
#pragma GCC unroll 12
    for (int r = 0; r < MANY; r++) {
      vf x = vf_set1(q[r * P]);
      BNY_USE_NOW(x);
      acc[r][0] = vf_fma(x, a, acc[r][0]);
      acc[r][1] = vf_fma(x, b, acc[r][1]);
    }
  }
}

// The scores of the classes [FIRST, FIRST + COUNT) of kOrder: a node of the tree.
template <int STEPS, int FIRST, int COUNT>
BNY_INLINE void add_tree(const float* q, const float* kt, int P, vf (&acc)[MANY][2]) {
  if constexpr (COUNT == 1) {
#pragma GCC unroll 12
    for (int r = 0; r < MANY; r++) acc[r][0] = acc[r][1] = vf_zero();
    add_class<STEPS>(q, kt, kOrder[FIRST], P, acc);
  } else {
    vf left[MANY][2];
    add_tree<STEPS, FIRST, COUNT / 2>(q, kt, P, left);
    add_tree<STEPS, FIRST + COUNT / 2, COUNT / 2>(q, kt, P, acc);
#pragma GCC unroll 12
    for (int r = 0; r < MANY; r++) acc[r][0] = vf_add(left[r][0], acc[r][0]), acc[r][1] = vf_add(left[r][1], acc[r][1]);
  }
}

// Scores of MANY queries and one panel of keys. q is [MANY][P], s [MANY][TILE].
template <int STEPS>
static __attribute__((noinline)) void score_panel(const float* q, const float* kt, float* s, int P) {
  vf acc[MANY][2];
  add_tree<STEPS, 0, VL>(q, kt, STEPS ? STEPS * VL : P, acc);
#pragma GCC unroll 12
  for (int r = 0; r < MANY; r++) vf_store(s + r * TILE, acc[r][0]), vf_store(s + r * TILE + VL, acc[r][1]);
}

// a_r = a_r * x_r + (sum_j p_rj v_j) * y_r over N vectors of MANY states.
template <int N>
static __attribute__((noinline)) void mix_many(const float* p, const float* v, Seen seen, float* states, const float* x, const float* y, int P) {
  const int64_t stride = state_size(P);
  vf acc[MANY][N];
#pragma GCC unroll 12
  for (int r = 0; r < MANY; r++)
#pragma GCC unroll 2
    for (int i = 0; i < N; i++) acc[r][i] = vf_zero();
#pragma GCC unroll 1
  for (int j = seen.lo; j < seen.hi; j++) {
    vf value[N];
#pragma GCC unroll 2
    for (int i = 0; i < N; i++) value[i] = vf_load(v + (int64_t)j * P + i * VL);
#pragma GCC unroll 12
    for (int r = 0; r < MANY; r++) {
      vf weight = vf_set1(p[r * TILE + j]);
      BNY_USE_NOW(weight);
#pragma GCC unroll 2
      for (int i = 0; i < N; i++) acc[r][i] = vf_fma(weight, value[i], acc[r][i]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < MANY; r++)
#pragma GCC unroll 2
    for (int i = 0; i < N; i++) {
      float* a = states + r * stride + i * VL;
      vf_store(a, vf_fma(acc[r][i], vf_set1(y[r]), vf_mul(vf_load(a), vf_set1(x[r]))));
    }
}

// weigh for n queries, a multiple of VL, step by step so that they overlap. s has room for 3 n floats behind the scores.
static inline void weigh_many(float* s, int n, const int* lo, const int* hi, const bny_kv& kv, float* states, int P) {
  float *x = s + (int64_t)n * TILE, *y = x + n, *m = y + n;
  const int64_t size = state_size(P);
  for (int r = 0; r < n; r++) {
    float* state = states + r * size;
    m[r] = greatest(s + (int64_t)r * TILE, lo[r], hi[r], kv);
    const float both = std::max(state[0], m[r]);
    x[r] = state[0] - both, y[r] = m[r] - both;
    state[0] = both;
  }
  for (int r = 0; r < 2 * n; r += VL) vf_store(x + r, vf_exp(vf_load(x + r)));
  for (int r = 0; r < n; r++) {
    float* l = states + r * size + 1;
    *l = std::fma(weights_of(s + (int64_t)r * TILE, lo[r], hi[r], kv, m[r]), y[r], *l * x[r]);
  }
}

static_assert(ROUND % MANY == 0 && ROUND % VL == 0);
// Floats that attend_many needs for n queries.
static inline int64_t many_scratch(int64_t n) { return n * (TILE + 3); }

// attend for n queries, a multiple of ROUND.
static inline void attend_many(
  const float* q, int n, const DenseTile& tile, const int* lo, const int* hi, const bny_kv& kv, float* states, int P, float* s) {
  const float *x = s + (int64_t)n * TILE, *y = x + n;
  const auto seen_by = [&](int at) {
    Seen seen{TILE, 0};
    for (int r = at; r < at + MANY; r++)
      if (lo[r] < hi[r]) seen.lo = std::min(seen.lo, lo[r]), seen.hi = std::max(seen.hi, hi[r]);
    return seen;
  };
  const auto score = P == 64 ? score_panel<64 / VL> : P == 128 ? score_panel<128 / VL> : score_panel<0>;
  for (int r = 0; r < n; r += MANY) {  // kt stays in the first cache, then v
    const Seen seen = seen_by(r);
    for (int panel = seen.lo / PANEL; panel * PANEL < seen.hi; panel++)
      score(q + (int64_t)r * P, tile.kt + (int64_t)panel * P * PANEL, s + (int64_t)r * TILE + panel * PANEL, P);
  }
  weigh_many(s, n, lo, hi, kv, states, P);
  for (int r = 0; r < n; r += MANY) {
    const Seen seen = seen_by(r);
    if (seen.lo >= seen.hi) continue;
    float* state = states + r * state_size(P) + VL;
    int d = 0;
    for (; d + 2 * VL <= P; d += 2 * VL) mix_many<2>(s + (int64_t)r * TILE, tile.v + d, seen, state + d, x + r, y + r, P);
    if (d < P) mix_many<1>(s + (int64_t)r * TILE, tile.v + d, seen, state + d, x + r, y + r, P);
  }
}

}  // namespace bny

#endif

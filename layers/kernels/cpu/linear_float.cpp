// Float32 and bfloat16 weights. Without instructions that multiply bfloat16 a weight becomes float32 in a register.
#include "linear.h"

namespace {

#if defined(BNY_AVX512) || defined(__ARM_NEON)
enum { MR = 12 };
#elif defined(__AVX2__)
enum { MR = 6 };
#else
enum { MR = 5 };
#endif
enum { ROWS_PER_TILE = 8 * MR };  // of x, that stay in cache while the panels pass

struct FloatRows {
  const float* x;
  int64_t ldx;
};

// The largest block takes all registers but one: the compiler must not broadcast the next row's value before this one is used up.
template <int M>
BNY_INLINE void in_order(vf& a) {
  if (M == MR) BNY_USE_NOW(a);
}

struct F32 {
  enum { ROWS = MR, FETCH_FROM = 3 };
  template <int M, int P>
  static void call(const Tile& t, int64_t panel, const FloatRows& rows, int64_t row) {
    const float* w = (const float*)(t.panel + panel * t.stride);
    const float* x = rows.x + row * rows.ldx;
    const int64_t stride = t.stride / 4, ldx = rows.ldx;
    vf acc[M][2 * P];
#pragma GCC unroll 12
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
      for (int v = 0; v < 2 * P; v++) acc[m][v] = vf_zero();
    for (int64_t k = 0; k < t.k; k++) {
      fetch<M, P>(t, k);
      vf b[2 * P];
#pragma GCC unroll 8
      for (int v = 0; v < 2 * P; v++) b[v] = vf_load(w + (v / 2) * stride + k * NR + (v % 2) * VL);
#pragma GCC unroll 12
      for (int m = 0; m < M; m++) {
        vf a = vf_set1(x[m * ldx + k]);
        in_order<M>(a);
#pragma GCC unroll 8
        for (int v = 0; v < 2 * P; v++) acc[m][v] = vf_fma(a, b[v], acc[m][v]);
      }
    }
    finish<M, P>(t, panel, row, acc);
  }

  // With few rows, which take several panels, the hardware does as well.
  template <int M, int P>
  BNY_INLINE void fetch(const Tile& t, int64_t step) {
    if (M > 2 && P == 1) __builtin_prefetch(t.ahead + step * t.ahead_step, 0, 2);
  }

  template <int M, int P>
  BNY_INLINE void finish(const Tile& t, int64_t panel, int64_t row, const vf (&acc)[M][2 * P]) {
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) {
      const int64_t at = panel * NR;
      store_row(t.y + (row + m) * t.ldy + at, acc[m], 2 * P, t.n - at, t.bias ? t.bias + at : nullptr);
    }
  }
};

#if defined(BNY_DOT_BF16)

// x rounded to bfloat16, two values to a word, in scratch.
struct PairRows {
  const uint32_t* x;
  int64_t ldx;
};

struct BF16 {
  enum { ROWS = MR, FETCH_FROM = 3 };
  template <int M, int P>
  static void call(const Tile& t, int64_t panel, const PairRows& rows, int64_t row) {
    const uint32_t* w = (const uint32_t*)(t.panel + panel * t.stride);
    const uint32_t* x = rows.x + row * rows.ldx;
    const int64_t stride = t.stride / 4, ldx = rows.ldx, pairs = div_up(t.k, 2);
    vf acc[M][2 * P];
#pragma GCC unroll 12
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
      for (int v = 0; v < 2 * P; v++) acc[m][v] = vf_zero();
    for (int64_t k = 0; k < pairs; k++) {
#pragma GCC unroll 8
      for (int v = 0; v < 2 * P; v++) {
        __m512bh b = (__m512bh)vi_load(w + (v / 2) * stride + k * NR + (v % 2) * VL);
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) acc[m][v] = _mm512_dpbf16_ps(acc[m][v], (__m512bh)vi_set1((int)x[m * ldx + k]), b);
      }
    }
    F32::finish<M, P>(t, panel, row, acc);
  }
};

void round_row(const float* x, int64_t k, uint32_t* out) {
  uint16_t* halves = (uint16_t*)out;
  int64_t i = 0;
  for (; i + 32 <= k; i += 32) _mm512_storeu_si512(halves + i, (__m512i)_mm512_cvtne2ps_pbh(vf_load(x + i + 16), vf_load(x + i)));
  for (; i < k; i++) halves[i] = f32_to_bf16(x[i]);
  if (k % 2) halves[k] = 0;
}

#else

struct BF16 {
  enum { ROWS = MR == 6 ? 5 : MR, FETCH_FROM = 3 };
  template <int M, int P>
  static void call(const Tile& t, int64_t panel, const FloatRows& rows, int64_t row) {
    const uint32_t* w = (const uint32_t*)(t.panel + panel * t.stride);
    const float* x = rows.x + row * rows.ldx;
    const int64_t stride = t.stride / 4, ldx = rows.ldx, pairs = t.k / 2;
    vf acc[M][2 * P];
#pragma GCC unroll 12
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
      for (int v = 0; v < 2 * P; v++) acc[m][v] = vf_zero();
    for (int64_t k = 0; k < pairs; k++) {
      const uint32_t* at = w + k * NR;
      F32::fetch<M, P>(t, k);
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        vf b[2 * P];
#pragma GCC unroll 8
        for (int v = 0; v < 2 * P; v++) {
          const vi words = vi_load(at + (v / 2) * stride + (v % 2) * VL);
          b[v] = half ? vf_high_bf16(words) : vf_low_bf16(words);
        }
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) {
          vf a = vf_set1(x[m * ldx + 2 * k + half]);
          in_order<M>(a);
#pragma GCC unroll 8
          for (int v = 0; v < 2 * P; v++) acc[m][v] = vf_fma(a, b[v], acc[m][v]);
        }
#if defined(__AVX2__)
        if (M == MR) __asm__ volatile("" ::: "memory");  // the second half loads the words again
#endif
      }
    }
    if (t.k % 2) {
#pragma GCC unroll 8
      for (int v = 0; v < 2 * P; v++) {
        vf low = vf_low_bf16(vi_load(w + (v / 2) * stride + pairs * NR + (v % 2) * VL));
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) acc[m][v] = vf_fma(vf_set1(x[m * ldx + 2 * pairs]), low, acc[m][v]);
      }
    }
    F32::finish<M, P>(t, panel, row, acc);
  }
};

#endif

template <class Kernel, class Rows, class At>
void run(const bny_linear_t* l, float* y, int64_t ldy, int64_t m, const At& at) {
  const int64_t tiles = div_up(m, ROWS_PER_TILE);
  run_tiles(tiles, div_up(l->n, NR), m * l->n * l->k, [&](int64_t tile, int64_t panel, int64_t count) {
    const int64_t first = m * tile / tiles, last = m * (tile + 1) / tiles;
    const Rows rows = at(first);
    run_rows<Kernel::ROWS, Kernel>(tile_of(l, panel, y + first * ldy, ldy), count, rows, last - first);
  });
}

}  // namespace

void float_rows(const bny_linear_t* l, const float* x, int64_t ldx, float* y, int64_t ldy, int64_t m, void* scratch) {
  auto plain = [&](int64_t row) { return FloatRows{x + row * ldx, ldx}; };
  if (l->kind == BNY_F32) {
    m < MANY_ROWS_F32 ? run<F32, FloatRows>(l, y, ldy, m, plain) : many_rows(l, x, ldx, y, ldy, m);
    return;
  }
#if defined(BNY_DOT_BF16)
  const int64_t words = div_up(l->k, 2);
  uint32_t* pairs = (uint32_t*)scratch;
  bny_parallel_spans(m, m * l->k, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) round_row(x + row * ldx, l->k, pairs + row * words);
  });
  run<BF16, PairRows>(l, y, ldy, m, [&](int64_t row) { return PairRows{pairs + row * words, words}; });
#else
  (void)scratch;
  m < MANY_ROWS_BF16 ? run<BF16, FloatRows>(l, y, ldy, m, plain) : many_rows(l, x, ldx, y, ldy, m);
#endif
}

int64_t float_scratch(const bny_linear_t* l, int64_t m) {
#if defined(BNY_DOT_BF16)
  return l->kind == BNY_BF16 ? round_up(m * div_up(l->k, 2) * 4, 64) : 0;
#else
  (void)l, (void)m;
  return 0;
#endif
}

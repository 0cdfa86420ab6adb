// Float weights times many rows: blocks of k, so that what is used again stays in cache.
//
// A span of rows meets one block of k of all its panels before the next block comes: the span's part of x (ROWS x BLOCK floats) stays in
// the second cache, the panel's (BLOCK x NR floats, bfloat16 expanded once per span) in the first. The sums wait in y between blocks.
// Each is still one chain of additions in ascending k that starts at zero, the same as in linear_float.cpp: loading and storing a float
// changes nothing, so neither does the number of rows.
#include "linear.h"

namespace {

#if defined(__AVX512F__) || defined(__ARM_NEON)
enum { MR = 12 };
#elif defined(__AVX2__)
enum { MR = 6 };
#else
enum { MR = 5 };
#endif
enum { BLOCK = 256, ROWS = 264, FEW_PANELS = 8 };

struct Block {
  const float* x;
  int64_t ldx;
  const float* w;     // [k][NR]
  int64_t k;
  const float* ahead;  // what comes next: k * NR floats to fetch a part of, or NULL
  int64_t ahead_lines;
  float* y;           // sums so far, and then
  int64_t ldy;
};

// The sums of M rows and one panel go on over a block of k.
template <int M, bool FIRST>
void sums(const Block& b) {
  const int64_t ldx = b.ldx, ldy = b.ldy, k = b.k;
  const float *w = b.w, *x = b.x;
  float* y = b.y;
  for (int64_t i = 0; i < b.ahead_lines; i++) __builtin_prefetch(b.ahead + i * 16, 0, 2);
  vf acc[M][2];
#pragma GCC unroll 12
  for (int m = 0; m < M; m++)
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) acc[m][v] = FIRST ? vf_zero() : vf_load(y + m * ldy + v * VL);
#pragma GCC unroll 1
  for (int64_t i = 0; i < k; i++) {
    const vf w0 = vf_load(w + i * NR), w1 = vf_load(w + i * NR + VL);
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) {
      vf a = vf_set1(x[m * ldx + i]);
#if defined(__AVX2__)
      __asm__ volatile("" : "+v"(a));  // in this order: with all broadcasts first there are too few registers
#endif
      acc[m][0] = vf_fma(a, w0, acc[m][0]);
      acc[m][1] = vf_fma(a, w1, acc[m][1]);
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; m++)
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) vf_store(y + m * ldy + v * VL, acc[m][v]);
}

template <bool FIRST>
void block_of_rows(int64_t size, const Block& b) {
  switch (size) {
    case 1: sums<1, FIRST>(b); break;
    case 2: sums<2, FIRST>(b); break;
    case 3: sums<3, FIRST>(b); break;
    case 4: sums<4, FIRST>(b); break;
    case 5: sums<5, FIRST>(b); break;
    case 6: if constexpr (MR >= 6) sums<6, FIRST>(b); break;
    case 7: if constexpr (MR >= 7) sums<7, FIRST>(b); break;
    case 8: if constexpr (MR >= 8) sums<8, FIRST>(b); break;
    case 9: if constexpr (MR >= 9) sums<9, FIRST>(b); break;
    case 10: if constexpr (MR >= 10) sums<10, FIRST>(b); break;
    case 11: if constexpr (MR >= 11) sums<11, FIRST>(b); break;
    default: if constexpr (MR >= 12) sums<12, FIRST>(b); break;
  }
}

// Values [begin, begin + k) of a panel as floats; out is used where they are not yet.
const float* panel_floats(int32_t kind, const char* panel, int64_t begin, int64_t k, float* out) {
  if (kind == BNY_F32) return (const float*)panel + begin * NR;
  const uint32_t* words = (const uint32_t*)panel + begin / 2 * NR;  // begin is even
  for (int64_t i = 0; i < k; i += 2, words += NR)
    for (int v = 0; v < 2; v++) {
      const vi both = vi_load(words + v * VL);
      vf_store(out + i * NR + v * VL, vf_low_bf16(both));
      if (i + 1 < k) vf_store(out + (i + 1) * NR + v * VL, vf_high_bf16(both));
    }
  return out;
}

struct Span {
  const bny_linear_t* l;
  const float* x;
  int64_t ldx;
  float* y;
  int64_t ldy;
  int64_t m;
};

// The results of a span's rows: panels [first, last), all of k.
void span_rows(const Span& s, int64_t first, int64_t last) {
  alignas(64) float expanded[BLOCK * NR];
  alignas(64) float edge[ROWS * NR];  // the sums of the last panel, where it is not full
  const bny_linear_t* l = s.l;
  const int64_t stride = panel_bytes(l->kind, l->k), parts = div_up(l->k, BLOCK), step = round_up(div_up(l->k, parts), 2);
  const int64_t blocks = div_up(s.m, MR);
  for (int64_t begin = 0; begin < l->k; begin += step) {
    const int64_t k = l->k - begin < step ? l->k - begin : step;
    const bool ends = begin + k == l->k;
    for (int64_t panel = first; panel < last; panel++) {
      const char* packed = (const char*)l->data + panel * stride;
      const int64_t channels = l->n - panel * NR < NR ? l->n - panel * NR : NR;
      const float* w = panel_floats(l->kind, packed, begin, k, expanded);
      const float* bias = ends && l->bias ? l->bias + panel * NR : nullptr;
      const bool edged = channels < NR;
      const int64_t size_of = l->kind == BNY_F32 ? 4 : 2;
      const char* next = packed + stride + begin * NR * size_of;
      const int64_t lines = div_up(k * NR * size_of / 64, blocks);
      for (int64_t b = 0; b < blocks; b++) {
        const int64_t row = s.m * b / blocks, size = s.m * (b + 1) / blocks - row;
        Block block{s.x + row * s.ldx + begin, s.ldx, w, k, (const float*)(next + b * lines * 64), panel + 1 < last ? lines : 0,
                    s.y + row * s.ldy + panel * NR, s.ldy};
        if (edged) block.y = edge + row * NR, block.ldy = NR;
        if (edged && begin > 0)
          for (int64_t r = 0; r < size; r++) memcpy(block.y + r * NR, s.y + (row + r) * s.ldy + panel * NR, channels * 4);
        if (begin == 0) {
          block_of_rows<true>(size, block);
        } else {
          block_of_rows<false>(size, block);
        }
        for (int64_t r = 0; edged && r < size; r++) memcpy(s.y + (row + r) * s.ldy + panel * NR, block.y + r * NR, channels * 4);
        for (int64_t r = 0; bias && r < size; r++) {
          float* out = s.y + (row + r) * s.ldy + panel * NR;
          for (int64_t c = 0; c < channels; c++) out[c] += bias[c];
        }
      }
    }
  }
}

}  // namespace

void many_rows(const bny_linear_t* l, const float* x, int64_t ldx, float* y, int64_t ldy, int64_t m) {
  const int64_t panels = div_up(l->n, NR), spans = div_up(m, ROWS);
  for (int64_t i = 0; i < spans; i++) {
    const int64_t first = m * i / spans, last = m * (i + 1) / spans;
    int64_t begin, end;
    bny_share(panels, omp_get_thread_num(), omp_get_num_threads(), &begin, &end);
    span_rows(Span{l, x + first * ldx, ldx, y + first * ldy, ldy, last - first}, begin, end);
  }
}

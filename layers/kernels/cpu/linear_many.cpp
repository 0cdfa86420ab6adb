// Float weights times many rows, by blocks of k, so that what is used again stays in cache.
//
// A span of rows meets one block of k of all its panels before the next block comes: the span's part of x (ROWS x BLOCK floats) stays
// in the second cache, the panel's (BLOCK x NR floats, expanded once for the span where it is bfloat16) in the first. Sums wait in y
// between blocks. Each is still one chain of additions that starts at zero and ascends in k, as in linear_float.cpp: a float does not
// change where it is stored and loaded, so results do not depend on the number of rows or on how they are split.
#include "linear.h"

namespace {

#if defined(BNY_AVX512) || defined(__ARM_NEON)
enum { MR = 12 };
#elif defined(__AVX2__)
enum { MR = 6 };
#else
enum { MR = 5 };
#endif
enum { BLOCK = 288, ROWS = 22 * 12, PANELS_PER_PIECE = 4 };

// M rows, one panel, one block of k.
struct Block {
  const float* x;  // [M][k], rows ldx apart
  int64_t ldx;
  const float* w;  // [k][NR]
  int64_t k;
  float* y;  // [M][NR], rows ldy apart
  int64_t ldy;
  const char* ahead;  // what comes from memory next: step i fetches ahead + i * ahead_step
  int64_t ahead_step;
};

// Sums go on over the block; the first one starts them.
template <int M, bool FIRST>
void add_block(const Block& b) {
  const int64_t ldx = b.ldx, ldy = b.ldy, k = b.k;
  const float *w = b.w, *x = b.x;
  float* y = b.y;
  const char* ahead = b.ahead;
  for (int m = 0; m < M; m++) __builtin_prefetch(y + (M + m) * ldy, 1);  // sums of the next rows
  vf acc[M][2];
#pragma GCC unroll 12
  for (int m = 0; m < M; m++)
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) acc[m][v] = FIRST ? vf_zero() : vf_load(y + m * ldy + v * VL);
#pragma GCC unroll 1
  for (int64_t i = 0; i < k; i++) {
    __builtin_prefetch(ahead + i * b.ahead_step, 0, 2);
    const vf w0 = vf_load(w + i * NR), w1 = vf_load(w + i * NR + VL);
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) {
      vf a = vf_set1(x[m * ldx + i]);
      BNY_USE_NOW(a);
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
void add_rows(int64_t size, const Block& b) {
  switch (size) {
    case 1: add_block<1, FIRST>(b); break;
    case 2: add_block<2, FIRST>(b); break;
    case 3: add_block<3, FIRST>(b); break;
    case 4: add_block<4, FIRST>(b); break;
    case 5: add_block<5, FIRST>(b); break;
    case 6: if constexpr (MR >= 6) add_block<6, FIRST>(b); break;
    case 7: if constexpr (MR >= 7) add_block<7, FIRST>(b); break;
    case 8: if constexpr (MR >= 8) add_block<8, FIRST>(b); break;
    case 9: if constexpr (MR >= 9) add_block<9, FIRST>(b); break;
    case 10: if constexpr (MR >= 10) add_block<10, FIRST>(b); break;
    case 11: if constexpr (MR >= 11) add_block<11, FIRST>(b); break;
    default: if constexpr (MR >= 12) add_block<12, FIRST>(b); break;
  }
}

// Pairs of bfloat16 [k / 2][NR][2] as floats [k][NR]; out has room for an even k.
void expand(const uint32_t* pairs, int64_t k, float* out) {
  for (int64_t i = 0; i < k; i += 2, pairs += NR)
    for (int v = 0; v < 2; v++) {
      const vi both = vi_load(pairs + v * VL);
      vf_store(out + i * NR + v * VL, vf_low_bf16(both));
      vf_store(out + (i + 1) * NR + v * VL, vf_high_bf16(both));
    }
}

// Rows that are worked on together.
struct Span {
  const bny_linear_t* l;
  const float* x;
  int64_t ldx;
  float* y;
  int64_t ldy;
  int64_t m;
};

// All rows of a span, one panel, values [begin, begin + k).
void add_panel(const Span& s, int64_t panel, int64_t begin, int64_t k, bool another) {
  alignas(64) float expanded[BLOCK * NR], edge[MR * NR];
  const bny_linear_t* l = s.l;
  const int64_t size_of = l->kind == BNY_F32 ? 4 : 2, stride = panel_bytes(l->kind, l->k), blocks = div_up(s.m, MR);
  const int64_t channels = l->n - panel * NR < NR ? l->n - panel * NR : NR, step = another ? div_up(NR * size_of, blocks) : 0;
  const char* packed = (const char*)l->data + panel * stride + begin * NR * size_of;  // begin is even
  const float* bias = l->bias && begin + k == l->k ? l->bias + panel * NR : nullptr;
  if (l->kind != BNY_F32) expand((const uint32_t*)packed, k, expanded);
  const float* w = l->kind == BNY_F32 ? (const float*)packed : expanded;
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t row = s.m * b / blocks, size = s.m * (b + 1) / blocks - row;
    float* y = s.y + row * s.ldy + panel * NR;
    Block block{s.x + row * s.ldx + begin, s.ldx, w, k, y, s.ldy, packed + (another ? stride + b * k * step : 0), step};
    if (channels < NR) {  // a panel that is not full has its sums elsewhere
      block.y = edge, block.ldy = NR;
      for (int64_t r = 0; r < size; r++) memcpy(edge + r * NR, y + r * s.ldy, channels * 4);
    }
    begin == 0 ? add_rows<true>(size, block) : add_rows<false>(size, block);
    for (int64_t r = 0; r < size && channels < NR; r++) memcpy(y + r * s.ldy, edge + r * NR, channels * 4);
    for (int64_t r = 0; r < size && bias; r++)
      for (int64_t c = 0; c < channels; c++) y[r * s.ldy + c] += bias[c];
  }
}

// Panels [first, last) of a span, all of k.
void add_panels(const Span& s, int64_t first, int64_t last) {
  const int64_t all = s.l->k, step = round_up(div_up(all, div_up(all, BLOCK)), 2);
  for (int64_t begin = 0; begin < all; begin += step)
    for (int64_t panel = first; panel < last; panel++)
      add_panel(s, panel, begin, all - begin < step ? all - begin : step, panel + 1 < last);
}

}  // namespace

void many_rows(const bny_linear_t* l, const float* x, int64_t ldx, float* y, int64_t ldy, int64_t m) {
  const int64_t panels = div_up(l->n, NR), spans = div_up(m, ROWS), threads = bny_threads(m * l->n * l->k);
  // As few pieces as keep all threads busy: each reads its rows anew.
  const int64_t wanted = threads <= 1 ? 1 : div_up(threads * BNY_PIECES, spans), most = div_up(panels, PANELS_PER_PIECE);
  const int64_t parts = wanted < most ? wanted : most;
  bny_parallel((int)threads, spans * parts, [&](int64_t i) {
    int64_t panel, end;
    bny_share(panels, i % parts, parts, &panel, &end);
    const int64_t span = i / parts, first = m * span / spans, last = m * (span + 1) / spans;
    add_panels(Span{l, x + first * ldx, ldx, y + first * ldy, ldy, last - first}, panel, end);
  });
}

// Integer weights: activations are quantised to int8 first, a row at a time, then products are sums of integers and exact.
#include "int_rows.h"

namespace {

#if defined(BNY_AVX512)
enum { MR_BYTES = 6, MR_NIBBLES = 6, I8_FETCH_FROM = 3 };  // rows at once; see run_rows
#elif defined(__AVX2__)
enum { MR_BYTES = 5, MR_NIBBLES = 6, I8_FETCH_FROM = 2 };
#else
enum { MR_BYTES = 4, MR_NIBBLES = 4, I8_FETCH_FROM = 3 };
#endif
enum { ROWS_PER_TILE = 48 };

// --- integers: every 32-bit lane of a vi is four bytes, and their products are summed

#if defined(BNY_AVX512)
BNY_INLINE vi abs8(vi a) { return _mm512_abs_epi8(a); }
BNY_INLINE vi sign8(vi a, vi by) { return _mm512_mask_sub_epi8(a, _mm512_movepi8_mask(by), _mm512_setzero_si512(), a); }
BNY_INLINE vi low4(vi a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
BNY_INLINE vi high4(vi a) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15)); }
#if defined(BNY_VNNI)
#if defined(BNY_EMULATED)
BNY_INLINE vi dot_us(vi acc, vi u, vi s) { return _mm512_dpbusd_epi32(acc, u, s); }
#else
// The compiler spills the accumulators of the intrinsic.
BNY_INLINE vi dot_us(vi acc, vi u, vi s) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(u), "v"(s));
  return acc;
}
#endif
BNY_INLINE vi dot_nibble(vi acc, vi u, vi s) { return dot_us(acc, u, s); }
BNY_INLINE vi nibble_sum(vi acc) { return acc; }
#else
BNY_INLINE vi dot_us(vi acc, vi u, vi s) {
  return _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_maddubs_epi16(u, s), _mm512_set1_epi16(1)));
}
BNY_INLINE vi dot_nibble(vi acc, vi u, vi s) { return _mm512_add_epi16(acc, _mm512_maddubs_epi16(u, s)); }
BNY_INLINE vi nibble_sum(vi acc) { return _mm512_madd_epi16(acc, _mm512_set1_epi16(1)); }
#endif

#elif defined(__AVX2__)
BNY_INLINE vi abs8(vi a) { return _mm256_abs_epi8(a); }
BNY_INLINE vi sign8(vi a, vi by) { return _mm256_sign_epi8(a, by); }
BNY_INLINE vi low4(vi a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
BNY_INLINE vi high4(vi a) { return _mm256_and_si256(_mm256_srli_epi16(a, 4), _mm256_set1_epi8(15)); }
// u at most 128 and s within +-127: two products fit 16 bits.
BNY_INLINE vi dot_us(vi acc, vi u, vi s) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1)));
}
// u at most 15: a group of 32 is 8 pairs of products a lane, 8 * 2 * 15 * 127 = 30480, which fits 16 bits.
BNY_INLINE vi dot_nibble(vi acc, vi u, vi s) { return _mm256_add_epi16(acc, _mm256_maddubs_epi16(u, s)); }
BNY_INLINE vi nibble_sum(vi acc) { return _mm256_madd_epi16(acc, _mm256_set1_epi16(1)); }

#else
typedef int8_t v16 __attribute__((vector_size(16)));
BNY_INLINE vi abs8(vi a) { return a; }  // here dot_us takes signed values as they are
BNY_INLINE vi sign8(vi a, vi by) {
  (void)by;
  return a;
}
BNY_INLINE vi low4(vi a) { return a & 0x0f0f0f0f; }
BNY_INLINE vi high4(vi a) { return (vi)((vu)a >> 4) & 0x0f0f0f0f; }
BNY_INLINE vi dot_us(vi acc, vi u, vi s) {
  const v16 a = (v16)u, b = (v16)s;
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 4; j++) acc[i] += (int32_t)a[4 * i + j] * (int32_t)b[4 * i + j];
  return acc;
}
BNY_INLINE vi dot_nibble(vi acc, vi u, vi s) { return dot_us(acc, u, s); }
BNY_INLINE vi nibble_sum(vi acc) { return acc; }
#endif

// How many vectors of channels are worked on together: both of a panel where one load of x then serves both.
#if defined(__AVX2__) && !defined(BNY_AVX512)
enum { TOGETHER = 2 };
#else
enum { TOGETHER = 1 };
#endif

// Add the products of four values of a row, for V vectors of channels. With several rows there is no register to spare, but the
// compiler orders additions anew and spills: there the order is written down.
template <int M, int V>
BNY_INLINE void add_nibbles(vi* acc, const vi* u, const int32_t* x) {
#if defined(__AVX2__) && !defined(BNY_AVX512)
  if constexpr (V == 2) {
    vi s, t;
    __asm__("vpbroadcastd %6, %2\n\tvpmaddubsw %2, %4, %3\n\tvpmaddubsw %2, %5, %2\n\tvpaddw %3, %0, %0\n\tvpaddw %2, %1, %1"
            : "+x"(acc[0]), "+x"(acc[M]), "=&x"(s), "=&x"(t)
            : "x"(u[0]), "x"(u[1]), "m"(*x));
    return;
  }
#endif
  for (int v = 0; v < V; v++) acc[v * M] = dot_nibble(acc[v * M], u[v], vi_set1(*x));
}

template <int M, int V>
BNY_INLINE void add_bytes(vi* acc, const vi* value, const vi* size, const int32_t* x) {
#if defined(__AVX2__) && !defined(BNY_AVX512)
  if constexpr (V == 2) {
    vi s, t;
    __asm__(
        "vpbroadcastd %8, %2\n\tvpsignb %4, %2, %3\n\tvpsignb %5, %2, %2\n\tvpmaddubsw %3, %6, %3\n\tvpmaddubsw %2, %7, %2\n\t"
        "vpmaddwd %9, %3, %3\n\tvpmaddwd %9, %2, %2\n\tvpaddd %3, %0, %0\n\tvpaddd %2, %1, %1"
        : "+x"(acc[0]), "+x"(acc[M]), "=&x"(s), "=&x"(t)
        : "x"(value[0]), "x"(value[1]), "x"(size[0]), "x"(size[1]), "m"(*x), "x"(_mm256_set1_epi16(1)));
    return;
  }
#endif
  for (int v = 0; v < V; v++) acc[v * M] = dot_us(acc[v * M], size[v], sign8(vi_set1(*x), value[v]));
}

// --- products of one group, for M rows and one vector of channels: w is the vector's place in [step][NR][4]

enum { STEP = NR * 4 };  // bytes from four values of all channels to the next four

// Fetches this block's share of the next panel for a piece of BYTES of this one.
template <int BYTES>
BNY_INLINE void fetch(const Tile& t, int64_t piece) {
  const int64_t share = BYTES * t.ahead_step / LINE;
  for (int64_t at = 0; at < share; at += LINE) __builtin_prefetch(t.ahead + piece * share + at, 0, 2);
}

template <int M, int V, int STEPS>
BNY_INLINE void dot_bytes(const char* w, const int32_t* const* x, int64_t at, vi* acc) {
#pragma GCC unroll 24
  for (int i = 0; i < V * M; i++) acc[i] = vi_zero();
#pragma GCC unroll 8
  for (int s = 0; s < STEPS; s++) {
    vi value[V], size[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) value[v] = vi_load(w + s * STEP + v * VL * 4), size[v] = abs8(value[v]);
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) add_bytes<M, V>(acc + m, value, size, x[m] + at + s);
  }
}

template <int M, int V>
BNY_INLINE void dot_nibbles(const char* w, const int32_t* const* x, int64_t at, vi* acc) {
#pragma GCC unroll 24
  for (int i = 0; i < V * M; i++) acc[i] = vi_zero();
#pragma GCC unroll 8
  for (int s = 0; s < 8; s++) {
    vi half[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) {
      const vi both = vi_load(w + s / 2 * STEP + v * VL * 4);
      half[v] = s % 2 ? high4(both) : low4(both);
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) add_nibbles<M, V>(acc + m, half, x[m] + at + s / 2 + s % 2 * 4);
  }
#pragma GCC unroll 24
  for (int i = 0; i < V * M; i++) acc[i] = nibble_sum(acc[i]);
}

template <int M>
BNY_INLINE void finish(const Tile& t, int64_t panel, int64_t row, int v, const vf* acc) {
  const int64_t at = panel * NR + v * VL;
#pragma GCC unroll 12
  for (int m = 0; m < M; m++) store_row(t.y + (row + m) * t.ldy + at, acc + m, 1, t.n - at, t.bias ? t.bias + at : nullptr);
}

// A kernel that takes its panels one after the other. Group::run adds the products of one with M rows.
template <class Group>
struct Grouped {
  enum { ROWS = Group::ROWS, FETCH_FROM = 1 };
  template <int M, int P>
  static void call(const Tile& t, int64_t first, const IntRows& rows, int64_t row) {
    for (int p = 0; p < P; p++) one<M>(t, first + p, rows, row);
  }

  template <int M>
  static __attribute__((noinline)) void one(const Tile& t, int64_t panel, const IntRows& rows, int64_t row) {
    const int32_t* x[M];
    const float* scales[M];
    for (int m = 0; m < M; m++) x[m] = rows.words(row + m), scales[m] = rows.scales(row + m);
    vf acc[2][M];
    for (int v = 0; v < 2; v++)
      for (int m = 0; m < M; m++) acc[v][m] = vf_zero();
    Group::template run<M>(t, t.panel + panel * t.stride, x, scales, rows.groups, acc);
    for (int v = 0; v < 2; v++) finish<M>(t, panel, row, v, acc[v]);
  }
};

struct Q4 {
  enum { ROWS = MR_NIBBLES };
  template <int M>
  BNY_INLINE void run(const Tile& t, const char* w, const int32_t* const* x, const float* const* scales, int64_t groups, vf (&acc)[2][M]) {
    constexpr int V = TOGETHER;
    vi dot[V * M];
    for (int64_t g = 0; g < groups; g++, w += Q4_BYTES) {
      fetch<Q4_BYTES>(t, g);
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        if (v % V == 0) dot_nibbles<M, V>(w + 4 * NR + v * VL * 4, x, g * 8, dot);
        const vf d = vf_from_f16((const uint16_t*)w + v * VL), low = vf_from_f16((const uint16_t*)w + NR + v * VL);
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) {
          acc[v][m] = vf_fma(vf_from_vi(dot[v % V * M + m]), vf_mul(d, vf_set1(scales[m][g])), acc[v][m]);
          acc[v][m] = vf_fma(low, vf_set1(scales[m][groups + g]), acc[v][m]);
        }
      }
    }
  }
};

struct Q8 {
  enum { ROWS = MR_BYTES };
  template <int M>
  BNY_INLINE void run(const Tile& t, const char* w, const int32_t* const* x, const float* const* scales, int64_t groups, vf (&acc)[2][M]) {
    constexpr int V = TOGETHER;
    vi dot[V * M];
    for (int64_t g = 0; g < groups; g++, w += Q8_BYTES) {
      fetch<Q8_BYTES>(t, g);
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        if (v % V == 0) dot_bytes<M, V, 8>(w + 2 * NR + v * VL * 4, x, g * 8, dot);
        const vf d = vf_from_f16((const uint16_t*)w + v * VL);
#pragma GCC unroll 12
        for (int m = 0; m < M; m++)
          acc[v][m] = vf_fma(vf_from_vi(dot[v % V * M + m]), vf_mul(d, vf_set1(scales[m][g])), acc[v][m]);
      }
    }
  }
};

struct Q4K {
  enum { ROWS = MR_NIBBLES };
  template <int M>
  BNY_INLINE void run(const Tile& t, const char* w, const int32_t* const* x, const float* const* scales, int64_t groups, vf (&acc)[2][M]) {
    constexpr int V = TOGETHER;
    for (int64_t b = 0; b < t.k / BLOCK_K; b++, w += Q4K_BYTES) {
#pragma GCC unroll 2
      for (int first = 0; first < 2; first += V) {
        const char* at = w + first * VL * 4;
        for (int s = 0; s < 8; s++) {
          const int64_t g = b * 8 + s;
          if (first == 0) fetch<Q4K_BYTES / 8>(t, g);
          vi dot[V * M];
          dot_nibbles<M, V>(at + (20 + s * 16) * NR, x, g * 8, dot);
#pragma GCC unroll 2
          for (int i = 0; i < V; i++) {
            const int v = first + i;
            const vf d = vf_from_f16((const uint16_t*)w + v * VL), dmin = vf_from_f16((const uint16_t*)w + NR + v * VL);
            const uint8_t *sc = (const uint8_t*)w + (4 + s) * NR + v * VL, *mn = sc + 8 * NR;
            const vf scale = vf_mul(d, vf_from_u8(sc)), low = vf_mul(dmin, vf_from_u8(mn));
#pragma GCC unroll 12
            for (int m = 0; m < M; m++) {
              acc[v][m] = vf_fma(vf_from_vi(dot[i * M + m]), vf_mul(scale, vf_set1(scales[m][g])), acc[v][m]);
              acc[v][m] = vf_fma(low, vf_set1(-scales[m][groups + g]), acc[v][m]);
            }
          }
        }
      }
    }
  }
};

struct Q6K {
  enum { ROWS = MR_BYTES };
  template <int M>
  BNY_INLINE void run(const Tile& t, const char* w, const int32_t* const* x, const float* const* scales, int64_t, vf (&acc)[2][M]) {
    constexpr int V = TOGETHER;
    for (int64_t b = 0; b < t.k / BLOCK_K; b++, w += Q6K_BYTES) {
#pragma GCC unroll 2
      for (int first = 0; first < 2; first += V) {
        const char* at = w + first * VL * 4;
        for (int s = 0; s < 16; s++) {
          if (first == 0) fetch<Q6K_BYTES / 16>(t, b * 16 + s);
          vi dot[V * M];
          dot_bytes<M, V, 4>(at + (18 + s * 16) * NR, x, b * 64 + s * 4, dot);
#pragma GCC unroll 2
          for (int i = 0; i < V; i++) {
            const int v = first + i;
            const vf d = vf_from_f16((const uint16_t*)w + v * VL);
            const vf scale = vf_mul(d, vf_from_i8((const int8_t*)w + (2 + s) * NR + v * VL));
#pragma GCC unroll 12
            for (int m = 0; m < M; m++)
              acc[v][m] = vf_fma(vf_from_vi(dot[i * M + m]), vf_mul(scale, vf_set1(scales[m][b * 8 + s / 2])), acc[v][m]);
          }
        }
      }
    }
  }
};

// One scale a row: integers are summed over all of k.
struct I8 {
  enum { ROWS = MR_BYTES, FETCH_FROM = I8_FETCH_FROM, AT_ONCE = 8 };  // AT_ONCE: steps for which something is fetched
  template <int M, int P>
  static void call(const Tile& t, int64_t first, const IntRows& rows, int64_t row) {
    const int32_t* x[M];
    for (int m = 0; m < M; m++) x[m] = rows.words(row + m);
    const char* base = t.panel + first * t.stride;
    const int64_t steps = div_up(t.k, 4);
    constexpr int V = M < FETCH_FROM ? 1 : TOGETHER;
    vi acc[2 * P][M];
#pragma GCC unroll 8
    for (int v = 0; v < 2 * P; v++)
#pragma GCC unroll 12
      for (int m = 0; m < M; m++) acc[v][m] = vi_zero();
    for (int64_t begin = 0; begin < steps; begin += AT_ONCE) {
      const int64_t end = begin + AT_ONCE < steps ? begin + AT_ONCE : steps;
      if (M >= FETCH_FROM) fetch<AT_ONCE * STEP>(t, begin / AT_ONCE);
      for (int64_t s = begin; s < end; s++) {
#pragma GCC unroll 8
        for (int v = 0; v < 2 * P; v += V) {
          vi value[V], size[V];
#pragma GCC unroll 2
          for (int i = 0; i < V; i++) {
            value[i] = vi_load(base + (v / 2) * t.stride + 8 * NR + s * STEP + (v % 2 + i) * VL * 4);
            size[i] = abs8(value[i]);
          }
#pragma GCC unroll 12
          for (int m = 0; m < M; m++) {
#if defined(BNY_VNNI)  // x + 128 is not negative; 128 times the channel's sum is taken off at the end
            acc[v][m] = dot_us(acc[v][m], vi_set1(x[m][s] ^ (int32_t)0x80808080), value[0]);
#else
            add_bytes<M, V>(&acc[v][m], value, size, x[m] + s);
#endif
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < 2 * P; v++) {
      const char* head = base + (v / 2) * t.stride + (v % 2) * VL * 4;
      const vf scale = vf_load((const float*)head);
      vf out[M];
#pragma GCC unroll 12
      for (int m = 0; m < M; m++) {
        vi sum = acc[v][m];
#if defined(BNY_VNNI)
        sum = _mm512_sub_epi32(sum, _mm512_slli_epi32(vi_load(head + 4 * NR), 7));
#endif
        out[m] = vf_mul(vf_from_vi(sum), vf_mul(scale, vf_set1(*rows.scales(row + m))));
      }
      finish<M>(t, first + v / 2, row, v % 2, out);
    }
  }
};

template <class Kernel>
void run(const bny_linear_t* l, const IntRows& rows, float* y, int64_t ldy, int64_t m) {
  const int64_t tiles = div_up(m, ROWS_PER_TILE);
  run_tiles(tiles, div_up(l->n, NR), m * l->n * l->k, [&](int64_t tile, int64_t panel, int64_t count) {
    const int64_t first = m * tile / tiles, last = m * (tile + 1) / tiles;
    const IntRows from{rows.base + first * rows.stride, rows.stride, rows.padded_k, rows.groups};
    run_rows<Kernel::ROWS, Kernel>(tile_of(l, panel, y + first * ldy, ldy), count, from, last - first);
  });
}

}  // namespace

void int_rows(const bny_linear_t* l, const float* x, int64_t ldx, float* y, int64_t ldy, int64_t m, void* scratch) {
  const IntRows rows = rows_of(l, (const char*)scratch);
  bny_parallel_spans(m, m * l->k * 2, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) quantize_row(x + row * ldx, l->k, l->kind != BNY_I8, rows, row);
  });
  switch (l->kind) {
    case BNY_I8: run<I8>(l, rows, y, ldy, m); break;
    case BNY_Q4: run<Grouped<Q4>>(l, rows, y, ldy, m); break;
    case BNY_Q8: run<Grouped<Q8>>(l, rows, y, ldy, m); break;
    case BNY_Q4K: run<Grouped<Q4K>>(l, rows, y, ldy, m); break;
    default: run<Grouped<Q6K>>(l, rows, y, ldy, m); break;
  }
}

int64_t int_scratch(const bny_linear_t* l, int64_t m) { return rows_of(l, nullptr).stride * m; }

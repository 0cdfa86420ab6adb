// What the linear kernels share: the packed layouts, and how rows and columns are split into blocks.
//
// A packed weight is a row of panels of NR output channels, the last one filled up with zeros; a panel holds all of k, so that one
// product streams through it. Within a panel channels are the fastest index: a vector holds VL channels, and every output is summed
// over k in ascending order in one lane, whatever the block of rows is. That is what makes a row independent of its batch.
#ifndef BANYAN_LINEAR_H
#define BANYAN_LINEAR_H

#include "kernels.h"
#include "pool.h"
#include "simd.h"

enum { NR = 2 * VL, GROUP = 32, BLOCK_K = 256 };

BNY_INLINE int64_t round_up(int64_t a, int64_t to) { return (a + to - 1) / to * to; }
BNY_INLINE int64_t div_up(int64_t a, int64_t by) { return (a + by - 1) / by; }

// Bytes in front of the values of one channel in one group or block, times NR; and of the values.
//   F32   [k][NR]                               BF16  [k / 2][NR][2]
//   I8    scales [NR] f32, sums of the channel [NR] i32, then [k / 4][NR][4]
//   Q4    a group: d [NR] f16, m [NR] f16, [4][NR][4] bytes: low halves are values 0-15, high halves 16-31
//   Q8    a group: d [NR] f16, [8][NR][4]
//   Q4K   a block: d [NR] f16, dmin [NR] f16, sc [8][NR] u8, mn [8][NR] u8, then 8 times [4][NR][4] as in Q4
//   Q6K   a block: d [NR] f16, sc [16][NR] i8, then 16 times [4][NR][4]
enum { Q4_BYTES = 20 * NR, Q8_BYTES = 34 * NR, Q4K_BYTES = 148 * NR, Q6K_BYTES = 274 * NR };

BNY_INLINE int64_t panel_bytes(int32_t kind, int64_t k) {
  switch (kind) {
    case BNY_F32: return round_up(k * NR * 4, 64);
    case BNY_BF16: return round_up(div_up(k, 2) * NR * 4, 64);
    case BNY_I8: return round_up(8 * NR + div_up(k, 4) * NR * 4, 64);
    case BNY_Q4: return round_up(div_up(k, GROUP) * Q4_BYTES, 64);
    case BNY_Q8: return round_up(div_up(k, GROUP) * Q8_BYTES, 64);
    case BNY_Q4K: return k % BLOCK_K ? -1 : round_up(k / BLOCK_K * Q4K_BYTES, 64);
    case BNY_Q6K: return k % BLOCK_K ? -1 : round_up(k / BLOCK_K * Q6K_BYTES, 64);
    default: return -1;
  }
}

// The end of a row that is no whole vector.
static __attribute__((noinline)) void store_tail(float* y, const float* lanes, int64_t n, const float* bias) {
  for (int64_t i = 0; i < n; i++) y[i] = bias ? lanes[i] + bias[i] : lanes[i];
}

// Writes result + bias of one row's vectors to y, n channels at most.
BNY_INLINE void store_row(float* y, const vf* acc, int vectors, int64_t n, const float* bias) {
  for (int v = 0; v < vectors; v++, y += VL, n -= VL) {
    if (n >= VL) {
      vf_store(y, bias ? vf_add(acc[v], vf_load(bias)) : acc[v]);
    } else if (n > 0) {
      float lanes[VL];
      vf_store(lanes, acc[v]);
      store_tail(y, lanes, n, bias);
    }
    if (bias) bias += VL;
  }
}

// A span of panels of one linear, and where its results go.
struct Tile {
  const char* panel;  // the first one
  int64_t stride;     // bytes from panel to panel
  int64_t n;          // channels from here to the end
  int64_t k;
  const float* bias;  // from here, or NULL
  float* y;           // from here
  int64_t ldy;
  const char* ahead;  // what comes from memory next: step s of a block of rows fetches ahead + s * ahead_step
  int64_t ahead_step;
};

BNY_INLINE Tile tile_of(const bny_linear_t* l, int64_t panel, float* y, int64_t ldy) {
  int64_t stride = panel_bytes(l->kind, l->k), at = panel * NR;
  return Tile{(const char*)l->data + panel * stride, stride, l->n - at, l->k, l->bias ? l->bias + at : nullptr, y + at, ldy, nullptr, 0};
}

enum { PANELS_AT_ONCE = 4 };  // with one row

// Calls body(tile of rows, first panel, panels) for all of [rows in tiles] x [panels], in pieces that threads take. A piece is some
// panels of one tile; with few rows their number is one that run_rows takes at once.
template <class Body>
static void run_tiles(int64_t tiles, int64_t panels, int64_t work, const Body& body) {
  const int threads = bny_threads(work);
  int64_t each = threads <= 1 ? panels : div_up(panels, div_up(threads * BNY_PIECES, tiles));
  each = round_up(each, PANELS_AT_ONCE);
  const int64_t parts = div_up(panels, each);
  bny_parallel(threads, tiles * parts, [&](int64_t i) {
    const int64_t first = i % parts * each;
    body(i / parts, first, panels - first < each ? panels - first : each);
  });
}

// Calls Kernel::call<M, P>(tile, first panel, rows, first row) for blocks of M <= MR rows and P panels; fewer rows than
// Kernel::FETCH_FROM take several panels at once, so that enough additions are under way, others fetch the panel that comes next.
template <int MR, class Kernel, class Rows>
static void run_rows(Tile tile, int64_t panels, const Rows& rows, int64_t m) {
  int64_t done = 0;
  if (m == 1 && Kernel::FETCH_FROM > 1) {
    for (; done + 4 <= panels; done += 4) Kernel::template call<1, 4>(tile, done, rows, 0);
    for (; done + 2 <= panels; done += 2) Kernel::template call<1, 2>(tile, done, rows, 0);
    for (; done < panels; done++) Kernel::template call<1, 1>(tile, done, rows, 0);
    return;
  }
  if (m == 2 && Kernel::FETCH_FROM > 2) {
    for (; done + 2 <= panels; done += 2) Kernel::template call<2, 2>(tile, done, rows, 0);
    for (; done < panels; done++) Kernel::template call<2, 1>(tile, done, rows, 0);
    return;
  }
  int64_t blocks = div_up(m, MR), base = m / blocks, extra = m % blocks;
  tile.ahead_step = LINE / blocks;
  for (; done < panels; done++) {
    int64_t row = 0;
    for (int64_t b = 0; b < blocks; b++) {
      int64_t size = base + (b < extra);
      tile.ahead = tile.panel + (done + (done + 1 < panels)) * tile.stride + b * tile.stride / blocks;
      switch (size) {
        case 1: Kernel::template call<1, 1>(tile, done, rows, row); break;
        case 2: Kernel::template call<2, 1>(tile, done, rows, row); break;
        case 3: Kernel::template call<3, 1>(tile, done, rows, row); break;
        case 4: Kernel::template call<4, 1>(tile, done, rows, row); break;
        case 5: if constexpr (MR >= 5) Kernel::template call<5, 1>(tile, done, rows, row); break;
        case 6: if constexpr (MR >= 6) Kernel::template call<6, 1>(tile, done, rows, row); break;
        case 7: if constexpr (MR >= 7) Kernel::template call<7, 1>(tile, done, rows, row); break;
        case 8: if constexpr (MR >= 8) Kernel::template call<8, 1>(tile, done, rows, row); break;
        case 9: if constexpr (MR >= 9) Kernel::template call<9, 1>(tile, done, rows, row); break;
        case 10: if constexpr (MR >= 10) Kernel::template call<10, 1>(tile, done, rows, row); break;
        case 11: if constexpr (MR >= 11) Kernel::template call<11, 1>(tile, done, rows, row); break;
        default: if constexpr (MR >= 12) Kernel::template call<12, 1>(tile, done, rows, row); break;
      }
      row += size;
    }
  }
}

// linear_float.cpp and linear_int.cpp: one link of the chain, with all threads.
void float_rows(const bny_linear_t* l, const float* x, int64_t ldx, float* y, int64_t ldy, int64_t m, void* scratch);
void int_rows(const bny_linear_t* l, const float* x, int64_t ldx, float* y, int64_t ldy, int64_t m, void* scratch);
// linear_many.cpp: what float_rows leaves to it, the same bits. From these rows on blocks of k gain more than they cost.
enum { MANY_ROWS_F32 = 48, MANY_ROWS_BF16 = 48 };
void many_rows(const bny_linear_t* l, const float* x, int64_t ldx, float* y, int64_t ldy, int64_t m);
int64_t float_scratch(const bny_linear_t* l, int64_t m);
int64_t int_scratch(const bny_linear_t* l, int64_t m);

#endif

// Attention over the slots of a pool, without a copy of what a request holds.
//
// A block is a few queries that read the same keys: consecutive tokens of one request, or one token each of requests that share a
// prefix. A block walks over its tiles from left to right (attend.h) and reads K and V of a tile once for all of its queries. Blocks
// run in parallel. Where there are too few of them, the tiles of a token are computed on their own and folded afterwards, in the
// same order.
#include "attention.h"

#include <vector>

#include "attend.h"
#include "attend_many.h"
#include "kv_row.h"
#include "pool.h"

namespace bny {
namespace {

constexpr int BLOCK_ROWS = 192;     // queries of a block, tokens times heads that share a KV head
constexpr int MANY_ROWS = 16;       // queries from which matrix products gain more than transposing K costs
constexpr int FEW_ROWS = 6;         // queries up to which keys are converted as often as they are read
constexpr int MOST_TOGETHER = 8;    // requests that a thread takes at once, so that it knows what it will read next
constexpr int64_t SMALL = 1 << 15;  // multiplications below which waking threads costs more than it saves

struct Block {
  int64_t request;          // whose row names the slots
  int64_t token, count;     // of the step; of a group: places in step.members
  int64_t position;         // of the first token; of a group: the length of what is shared
  int head, num_heads;      // KV heads
  int64_t tile, end;        // tiles
  bool shared, part;        // part: leaves the states of its tiles for the fold
};

struct Work {
  const bny_kv& kv;
  const bny_step& step;
  const float* q;
  int64_t q_stride;
  float* out;
  int64_t out_stride;
  int P, group;                         // group: query heads of a KV head
  std::vector<Block> first, blocks;     // first: those of shared prefixes, whose states the others start from
  size_t num_extends;                   // blocks at the start that are taken one by one
  std::vector<int64_t> shared_tiles;    // of each request, 0 where it shares nothing
  std::vector<int64_t> part_of;         // of each request: its first tile's place in parts, -1 where it is not cut
  std::vector<int64_t> first_tile;      // of each request that is cut
  std::vector<int64_t> num_tiles;
  float *shared_states, *parts;
};

// Per-thread memory that lives on from call to call.
struct Scratch {
  std::vector<float> q, states, rows, many;
  std::vector<int> lo, hi;
  Tile tile;
  float* grown(std::vector<float>& v, int64_t size) {
    if ((int64_t)v.size() < size) v.resize(size);
    return v.data();
  }
};
thread_local Scratch scratch;
thread_local std::vector<float> shared_memory, parts_memory;  // of the thread that calls, used by all that help it

int64_t first_key(const bny_kv& kv, int64_t position) { return kv.window > 0 ? std::max<int64_t>(0, position - kv.window + 1) : 0; }

// Rows of one KV head at a tile.
struct Rows {
  const bny_kv& kv;
  const int32_t* slots;
  int head;
  int64_t place(int j) const { return (int64_t)slots[j] * kv.kv_heads + head; }
  const char* raw(const void* base, int j) const { return (const char*)base + place(j) * kv.head_dim * element_size(kv.type); }
};

void read_row(const Rows& rows, const void* base, const float* scales, int j, float* out, int P) {
  const char* from = rows.raw(base, j);
  const int D = rows.kv.head_dim, whole = D / VL * VL;
  if (rows.kv.type == BNY_KV_F32) {
    memcpy(out, from, sizeof(float) * D);
  } else if (rows.kv.type == BNY_KV_BF16) {
    const uint16_t* x = (const uint16_t*)from;
    for (int d = 0; d < whole; d += VL) vf_store(out + d, vf_from_bf16(x + d));
    for (int d = whole; d < D; d++) out[d] = bf16_to_f32(x[d]);
  } else {
    const int8_t* x = (const int8_t*)from;
    const float scale = scales[rows.place(j)];
    for (int d = 0; d < whole; d += VL) vf_store(out + d, vf_mul(vf_from_i8(x + d), vf_set1(scale)));
    for (int d = whole; d < D; d++) out[d] = x[d] * scale;
  }
  for (int d = D; d < P; d++) out[d] = 0;
}

// The keys [lo, hi) of a tile where they lie.
void open_tile(const Rows& rows, int lo, int hi) {
  Tile& tile = scratch.tile;
  tile.lo = lo, tile.hi = hi;
  for (int j = lo; j < hi; j++) {
    tile.k[j] = rows.raw(rows.kv.k, j), tile.v[j] = rows.raw(rows.kv.v, j);
    if (rows.kv.type != BNY_KV_S8) continue;
    tile.k_scale[j] = rows.kv.k_scale[rows.place(j)], tile.v_scale[j] = rows.kv.v_scale[rows.place(j)];
  }
}

// The same as float32 rows of P values in scratch.
void convert_tile(const Rows& rows, int lo, int hi, int P, Ahead& ahead) {
  Tile& tile = scratch.tile;
  tile.lo = lo, tile.hi = hi;
  float* k = scratch.grown(scratch.rows, 2 * TILE * P);
  float* v = k + TILE * P;
  for (int j = lo; j < hi; j++) {
    ahead.fetch(0, j + 1), ahead.fetch(1, j + 1);
    tile.k[j] = k + j * P, tile.v[j] = v + j * P;
    read_row(rows, rows.kv.k, rows.kv.k_scale, j, k + j * P, P);
    read_row(rows, rows.kv.v, rows.kv.v_scale, j, v + j * P, P);
  }
}

// The same as matrices.
DenseTile open_dense(const Rows& rows, int lo, int hi, int P, bool direct, Ahead& ahead, float* memory) {
  Tile& tile = scratch.tile;
  float *kt = memory, *v = memory + TILE * P;
  direct ? open_tile(rows, lo, hi) : convert_tile(rows, lo, hi, P, ahead);
  const float* k[TILE];
  for (int j = 0; j < TILE; j++) k[j] = (const float*)tile.k[j < lo || j >= hi ? lo : j];  // of keys that nobody sees any row
  transpose_tile(k, kt, P);
  if (!direct) return DenseTile{kt, scratch.rows.data() + TILE * P};
  for (int j = lo; j < hi; j++) memcpy(v + j * P, tile.v[j], sizeof(float) * P);
  return DenseTile{kt, v};
}

const int32_t* slots_of(const bny_step& step, int64_t request) { return step.table + step.rows[request] * step.table_stride; }

// Tokens and positions of a block's queries.
int64_t token_of(const Work& w, const Block& b, int64_t i) {
  return b.shared ? w.step.starts[w.step.members[b.token + i]] : b.token + i;
}

void load_queries(const Work& w, const Block& b, float* q) {
  const int D = w.kv.head_dim;
  for (int h = 0; h < b.num_heads; h++)
    for (int64_t i = 0; i < b.count; i++) {
      const float* from = w.q + token_of(w, b, i) * w.q_stride + (int64_t)(b.head + h) * w.group * D;
      for (int g = 0; g < w.group; g++, q += w.P) {
        memcpy(q, from + g * D, sizeof(float) * D);
        for (int d = D; d < w.P; d++) q[d] = 0;
      }
    }
}

float* shared_state(const Work& w, int64_t request, int64_t head) {
  return w.shared_states + (request * w.kv.heads + head) * state_size(w.P);
}

float* part_state(const Work& w, int64_t request, int64_t tile, int64_t head) {
  const int64_t place = w.part_of[request] + tile - w.first_tile[request];
  return w.parts + (place * w.kv.heads + head) * state_size(w.P);
}

// Where the state of query (h, i, g) of a block starts from, and where it goes.
void start_states(const Work& w, const Block& b, float* states) {
  const int64_t size = state_size(w.P);
  const bool continues = !b.shared && !b.part && w.shared_tiles[b.request] > 0;
  for (int64_t n = 0; n < (int64_t)b.num_heads * b.count * w.group; n++) {
    if (continues)
      memcpy(states + n * size, shared_state(w, b.request, (int64_t)b.head * w.group + n), sizeof(float) * size);
    else
      clear_state(states + n * size, w.P);
  }
}

void finish_states(const Work& w, const Block& b, const float* states, int64_t tile) {
  const int64_t size = state_size(w.P);
  const int D = w.kv.head_dim;
  for (int h = 0; h < b.num_heads; h++)
    for (int64_t i = 0; i < b.count; i++)
      for (int g = 0; g < w.group; g++, states += size) {
        const int64_t head = (int64_t)(b.head + h) * w.group + g;
        if (b.shared)
          memcpy(shared_state(w, w.step.members[b.token + i], head), states, sizeof(float) * size);
        else if (b.part)
          memcpy(part_state(w, b.request, tile, head), states, sizeof(float) * size);
        else
          finish_state(states, w.out + (b.token + i) * w.out_stride + head * D, D, w.P);
      }
}

// What each query of a block sees of a tile, and what the tile must hold.
void visible(const Work& w, const Block& b, int64_t tile, int* lo_all, int* hi_all) {
  const int64_t begin = tile * TILE;
  *lo_all = TILE, *hi_all = 0;
  for (int64_t i = 0; i < b.count; i++) {
    int lo = 0, hi = TILE;
    if (!b.shared) {
      const int64_t position = b.position + i;
      lo = (int)std::min<int64_t>(TILE, std::max<int64_t>(0, first_key(w.kv, position) - begin));
      hi = (int)std::max<int64_t>(0, std::min<int64_t>(TILE, position + 1 - begin));
    }
    for (int g = 0; g < w.group; g++) scratch.lo[i * w.group + g] = lo, scratch.hi[i * w.group + g] = hi;
    if (lo < hi) *lo_all = std::min(*lo_all, lo), *hi_all = std::max(*hi_all, hi);
  }
}

// What a block reads at a tile, or its successor at its first one where it has no more.
Ahead look_ahead(const Work& w, const Block* b, int64_t tile, const Block* next) {
  if (tile >= b->end) b = next, tile = b ? b->tile : 0;
  Ahead ahead;
  if (b == nullptr) return ahead;
  const bny_kv& kv = w.kv;
  const int64_t last = b->shared ? b->position : b->position + b->count;
  ahead.slots = slots_of(w.step, b->request) + tile * TILE;
  ahead.count = (int)std::min<int64_t>(TILE, last - tile * TILE);
  ahead.bytes = b->num_heads * kv.head_dim * element_size(kv.type);
  ahead.stride = (int64_t)kv.kv_heads * kv.head_dim * element_size(kv.type), ahead.scale_stride = kv.kv_heads;
  const void* const bases[2] = {kv.k, kv.v};
  const float* const scales[2] = {kv.k_scale, kv.v_scale};
  for (int i = 0; i < 2; i++) {
    ahead.base[i] = (const char*)bases[i] + (int64_t)b->head * kv.head_dim * element_size(kv.type);
    ahead.scale[i] = scales[i] ? scales[i] + b->head : nullptr;
  }
  return ahead;
}

// Whether the keys are read by whoever computes with them, rather than converted before.
bool reads_floats(const Work& w) { return w.kv.type == BNY_KV_F32 && w.P == w.kv.head_dim; }

// A block of many queries of one KV head, none of which is left for the fold.
void run_many(const Work& w, const Block& b, const Block* next) {
  const int64_t n = b.count * w.group, padded = (n + ROUND - 1) / ROUND * ROUND, size = state_size(w.P);
  float* q = scratch.grown(scratch.q, padded * w.P);
  float* states = scratch.grown(scratch.states, padded * size);
  float* memory = scratch.grown(scratch.many, many_scratch(padded) + 2 * TILE * w.P);
  if ((int64_t)scratch.lo.size() < padded) scratch.lo.resize(padded), scratch.hi.resize(padded);
  load_queries(w, b, q);
  start_states(w, b, states);
  memset(q + n * w.P, 0, sizeof(float) * (padded - n) * w.P);
  for (int64_t i = n; i < padded; i++) scratch.lo[i] = scratch.hi[i] = 0, clear_state(states + i * size, w.P);
  for (int64_t tile = b.tile; tile < b.end; tile++) {
    int lo, hi;
    visible(w, b, tile, &lo, &hi);
    if (lo >= hi) continue;
    Ahead ahead = look_ahead(w, &b, tile + 1, next);
    ahead.share(0, 1);
    const Rows rows{w.kv, slots_of(w.step, b.request) + tile * TILE, b.head};
    const DenseTile dense = open_dense(rows, lo, hi, w.P, reads_floats(w), ahead, memory + many_scratch(padded));
    ahead.fetch(0, TILE), ahead.fetch(1, TILE);
    attend_many(q, (int)padded, dense, scratch.lo.data(), scratch.hi.data(), w.kv, states, w.P, memory);
  }
  finish_states(w, b, states, 0);
}

// One KV head of a tile and n queries.
void run_few(const Work& w, const Rows& rows, int lo, int hi, const float* q, int n, Ahead& ahead, float* states) {
  const int *from = scratch.lo.data(), *to = scratch.hi.data();
  const Tile& tile = scratch.tile;
  if (w.P != w.kv.head_dim || (w.kv.type != BNY_KV_F32 && n > FEW_ROWS)) {
    convert_tile(rows, lo, hi, w.P, ahead);
    return attend<Float32>(q, n, tile, ahead, from, to, w.kv, states, w.P);
  }
  open_tile(rows, lo, hi);
  switch (w.kv.type) {
    case BNY_KV_F32: return attend<Float32>(q, n, tile, ahead, from, to, w.kv, states, w.P);
    case BNY_KV_BF16: return attend<Bfloat16>(q, n, tile, ahead, from, to, w.kv, states, w.P);
    default: return attend<Int8>(q, n, tile, ahead, from, to, w.kv, states, w.P);
  }
}

// next: the block that this thread takes after b, or NULL.
void run_block(const Work& w, const Block& b, const Block* next) {
  const int64_t n = b.count * w.group, all = n * b.num_heads, size = state_size(w.P);
  if (b.num_heads == 1 && !b.part && n >= MANY_ROWS) return run_many(w, b, next);
  float* q = scratch.grown(scratch.q, all * w.P);
  float* states = scratch.grown(scratch.states, all * size);
  if ((int64_t)scratch.lo.size() < n) scratch.lo.resize(n), scratch.hi.resize(n);
  load_queries(w, b, q);
  start_states(w, b, states);
  for (int64_t tile = b.tile; tile < b.end; tile++) {
    int lo, hi;
    visible(w, b, tile, &lo, &hi);
    Ahead ahead = look_ahead(w, &b, tile + 1, next);
    for (int h = 0; h < b.num_heads && lo < hi; h++) {
      ahead.share(h, b.num_heads);
      const Rows rows{w.kv, slots_of(w.step, b.request) + tile * TILE, b.head + h};
      run_few(w, rows, lo, hi, q + h * n * w.P, (int)n, ahead, states + h * n * size);
    }
    if (b.part) {
      finish_states(w, b, states, tile);
      start_states(w, b, states);
    }
  }
  if (!b.part) finish_states(w, b, states, 0);
}

// The parts of one token's query head, in order.
void fold_parts(const Work& w, int64_t request, int64_t head) {
  float* state = scratch.grown(scratch.states, state_size(w.P));
  if (w.shared_tiles[request] > 0)
    memcpy(state, shared_state(w, request, head), sizeof(float) * state_size(w.P));
  else
    clear_state(state, w.P);
  for (int64_t i = 0; i < w.num_tiles[request]; i++) fold_state(state, part_state(w, request, w.first_tile[request] + i, head), w.P);
  finish_state(state, w.out + w.step.starts[request] * w.out_stride + head * w.kv.head_dim, w.kv.head_dim, w.P);
}

// Blocks of many tokens one by one, the others several at once.
void run_blocks(const Work& w, int threads) {
  const int64_t single = w.num_extends, rest = (int64_t)w.blocks.size() - single;
  const int64_t each = std::max<int64_t>(1, std::min<int64_t>(MOST_TOGETHER, rest / (8 * threads)));
  bny_parallel(threads, single + (rest + each - 1) / each, [&](int64_t piece) {
    const int64_t begin = piece < single ? piece : single + (piece - single) * each;
    const int64_t end = piece < single ? piece + 1 : std::min(begin + each, single + rest);
    for (int64_t i = begin; i < end; i++) run_block(w, w.blocks[i], i + 1 < end ? &w.blocks[i + 1] : nullptr);
  });
}

// --- planning -----------------------------------------------------------------------------------------------------------------

void plan_groups(Work& w, int threads) {
  const bny_step& step = w.step;
  if (w.kv.window > 0) return;
  for (int64_t g = 0, begin = 0; g < step.num_groups; begin = step.group_ends[g++]) {
    const int64_t members = step.group_ends[g] - begin, tiles = step.group_lens[g] / TILE;
    if (tiles == 0) continue;
    for (int64_t i = 0; i < members; i++) w.shared_tiles[step.members[begin + i]] = tiles;
    int64_t each = std::max<int64_t>(1, BLOCK_ROWS / w.group);
    while (each > 2 && w.kv.kv_heads * ((members + each - 1) / each) < 2 * threads) each = (each + 1) / 2;
    for (int h = 0; h < w.kv.kv_heads; h++)
      for (int64_t i = 0; i < members; i += each)
        w.first.push_back({step.members[begin], begin + i, std::min(each, members - i), tiles * TILE, h, 1, 0, tiles, true, false});
  }
}

void plan_decode(Work& w, int64_t b, int64_t num_decodes, int threads) {
  const int64_t position = w.step.seq_lens[b] - 1, end = position / TILE + 1;
  const int64_t begin = std::max(w.shared_tiles[b], first_key(w.kv, position) / TILE);
  const int64_t token = w.step.starts[b];
  if (num_decodes >= 4 * threads) {
    w.blocks.push_back({b, token, 1, position, 0, w.kv.kv_heads, begin, end, false, false});
    return;
  }
  const int64_t wanted = (4 * threads + num_decodes * w.kv.kv_heads - 1) / (num_decodes * w.kv.kv_heads);
  const int64_t each = std::max<int64_t>(1, (end - begin + wanted - 1) / wanted);
  const bool cut = threads > 1 && end - begin > each;
  if (cut) {
    w.part_of[b] = 0;  // until all are known
    w.first_tile[b] = begin, w.num_tiles[b] = end - begin;
  }
  for (int h = 0; h < w.kv.kv_heads; h++)
    for (int64_t t = begin; t < end; t += cut ? each : end - begin)
      w.blocks.push_back({b, token, 1, position, h, 1, t, cut ? std::min(end, t + each) : end, false, cut});
}

void plan_extend(Work& w, int64_t b, int threads) {
  const int64_t length = w.step.extend_lens[b], prefix = w.step.seq_lens[b] - length;
  int64_t each = std::max<int64_t>(1, BLOCK_ROWS / w.group);
  while (threads > 1 && each > 8 && w.kv.kv_heads * w.step.num_requests * ((length + each - 1) / each) < 4 * threads) each = (each + 1) / 2;
  for (int64_t i = (length - 1) / each * each; i >= 0; i -= each)  // the longest first
    for (int h = 0; h < w.kv.kv_heads; h++) {
      const int64_t count = std::min(each, length - i), position = prefix + i;
      const int64_t tile = first_key(w.kv, position) / TILE, end = (position + count - 1) / TILE + 1;
      w.blocks.push_back({b, w.step.starts[b] + i, count, position, h, 1, tile, end, false, false});
    }
}

int64_t plan(Work& w, int threads) {
  const bny_step& step = w.step;
  int64_t num_decodes = 0, work = 0, num_parts = 0;
  for (int64_t b = 0; b < step.num_requests; b++) {
    num_decodes += step.extend_lens[b] == 1;
    work += step.extend_lens[b] * step.seq_lens[b] * w.kv.heads * w.kv.head_dim * 2;
  }
  if (work < SMALL) threads = 1;
  plan_groups(w, threads);
  for (int64_t b = 0; b < step.num_requests; b++)
    if (step.extend_lens[b] > 1) plan_extend(w, b, threads);
  w.num_extends = w.blocks.size();
  for (int64_t b = 0; b < step.num_requests; b++)
    if (step.extend_lens[b] == 1) {
      plan_decode(w, b, num_decodes, threads);
      if (w.part_of[b] >= 0) w.part_of[b] = num_parts, num_parts += w.num_tiles[b];
    }
  const int64_t each = w.kv.heads * state_size(w.P);
  if ((int64_t)parts_memory.size() < num_parts * each) parts_memory.resize(num_parts * each);
  if (!w.first.empty() && (int64_t)shared_memory.size() < step.num_requests * each) shared_memory.resize(step.num_requests * each);
  w.parts = parts_memory.data(), w.shared_states = shared_memory.data();
  return work < SMALL ? 1 : threads;
}

}  // namespace
}  // namespace bny

extern "C" {

void bny_attention(const bny_kv* kv, const bny_step* step, const float* q, int64_t q_stride, float* out, int64_t out_stride) {
  using namespace bny;
  const size_t n = step->num_requests;
  Work w{*kv, *step, q, q_stride, out, out_stride, (kv->head_dim + VL - 1) / VL * VL, kv->heads / kv->kv_heads, {}, {}, 0, {}, {}, {}, {}, nullptr, nullptr};
  w.shared_tiles.assign(n, 0), w.part_of.assign(n, -1), w.first_tile.assign(n, 0), w.num_tiles.assign(n, 0);
  const int threads = (int)plan(w, omp_get_max_threads());
  bny_parallel(threads, (int64_t)w.first.size(), [&](int64_t i) { run_block(w, w.first[i], nullptr); });
  run_blocks(w, threads);
  std::vector<int64_t> cut;
  for (size_t b = 0; b < n; b++)
    if (w.part_of[b] >= 0) cut.push_back((int64_t)b);
  const int64_t folds = (int64_t)cut.size() * kv->heads;
  bny_parallel(threads, std::min<int64_t>(folds, 4 * threads), [&](int64_t i) {
    int64_t begin, end;
    bny_share(folds, i, std::min<int64_t>(folds, 4 * threads), &begin, &end);
    for (; begin < end; begin++) fold_parts(w, cut[begin / kv->heads], begin % kv->heads);
  });
}

void bny_kv_write(const bny_kv* kv, const bny_step* step, const float* k, int64_t k_stride, const float* v, int64_t v_stride) {
  using namespace bny;
  const int64_t T = step->num_tokens, D = kv->head_dim, heads = kv->kv_heads;
  bny_parallel_spans(T, T * heads * D, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++)
      for (int64_t h = 0; h < heads; h++) {
        write_row(*kv, kv->k, kv->k_scale, step->slots[t] * heads + h, k + t * k_stride + h * D);
        write_row(*kv, kv->v, kv->v_scale, step->slots[t] * heads + h, v + t * v_stride + h * D);
      }
  });
}

int64_t bny_check_slots(const bny_step* step, int64_t num_slots) {
  for (int64_t t = 0; t < step->num_tokens; t++)
    if (step->slots[t] < 0 || step->slots[t] >= num_slots) return t;
  for (int64_t b = 0; b < step->num_requests; b++) {
    const int32_t* slots = bny::slots_of(*step, b);
    const uint32_t limit = (uint32_t)num_slots;
    uint32_t bad = 0;
    for (int64_t i = 0; i < step->seq_lens[b]; i++) bad |= (uint32_t)slots[i] >= limit;
    if (bad) return b;
  }
  return -1;
}
}

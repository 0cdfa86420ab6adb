// Attention over slots. See attention.cpp for how it is computed, attend.h for the arithmetic.
#ifndef BANYAN_ATTENTION_H
#define BANYAN_ATTENTION_H

#include <stdint.h>

#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { BNY_KV_F32 = 0, BNY_KV_BF16 = 1, BNY_KV_S8 = 2 };

// K and V of one layer: [slots, kv_heads, head_dim] each; with BNY_KV_S8 a float scale per slot and head, [slots, kv_heads].
struct bny_kv {
  void* k;
  void* v;
  float* k_scale;
  float* v_scale;
  int32_t type;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t heads;      // of queries
  float scale;
  float soft_cap;     // 0: none
  int64_t window;     // 0: none
};

// What all layers of a step share. Request b computes tokens [starts[b], starts[b] + extend_lens[b]) of the step.
// Group g: the requests members[group_ends[g - 1] .. group_ends[g]) compute one token each, and the first group_lens[g] slots of
// their rows are the same.
struct bny_step {
  const int32_t* table;        // [rows, table_stride]
  const int64_t* rows;         // [num_requests]
  const int64_t* seq_lens;
  const int64_t* extend_lens;
  const int64_t* starts;
  const int64_t* slots;        // [num_tokens], where K and V of each token go
  const int64_t* members;
  const int64_t* group_ends;
  const int64_t* group_lens;
  int64_t table_stride;
  int64_t num_requests;
  int64_t num_tokens;
  int64_t num_groups;
};

// out[t, h, :] of every token of the step; q and out are [num_tokens, heads, head_dim], their strides in floats between tokens.
BNY_API void bny_attention(const bny_kv* kv, const bny_step* step, const float* q, int64_t q_stride, float* out, int64_t out_stride);

// Writes K and V [num_tokens, kv_heads, head_dim] to the slots of the step.
BNY_API void bny_kv_write(const bny_kv* kv, const bny_step* step, const float* k, int64_t k_stride, const float* v, int64_t v_stride);

// The index of the first token or request whose slots are not all in [0, num_slots), -1 if there is none.
BNY_API int64_t bny_check_slots(const bny_step* step, int64_t num_slots);

#ifdef __cplusplus
}
#endif

#endif

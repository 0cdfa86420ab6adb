// What stands between linears and attention. Rows are float32; ld is the distance of rows in floats. Norm weights are float32, Gemma's
// with the 1 added.
#ifndef BANYAN_SMALL_OPS_H
#define BANYAN_SMALL_OPS_H

#include "attention.h"

#ifdef __cplusplus
extern "C" {
#endif

enum bny_act { BNY_SILU = 0, BNY_GELU_TANH = 1, BNY_GELU = 2 };

// out[t] = table[ids[t]] * scale. type is BNY_F32 or BNY_BF16.
BNY_API void bny_embed(const void* table, int32_t type, const int64_t* ids, int64_t T, int64_t dim, float scale, float* out, int64_t ldo);

// out = x / sqrt(mean(x^2) + eps) * weight. out may be x.
BNY_API void bny_norm(const float* x, int64_t ldx, const float* weight, float eps, float* out, int64_t ldo, int64_t T, int64_t dim);

// sum += x, then out = norm(sum).
BNY_API void bny_add_norm(
    const float* x, int64_t ldx, float* sum, int64_t lds, const float* weight, float eps, float* out, int64_t ldo, int64_t T, int64_t dim);

// out[t] = act(x[t][0:inner]) * x[t][inner:2 inner].
BNY_API void bny_act_mul(int32_t act, const float* x, int64_t ldx, float* out, int64_t ldo, int64_t T, int64_t inner);

// Rows of Q, K and V side by side, [heads + 2 kv_heads][head_dim]: q and k are normed where weights are given, rotated by the tables at
// the tokens' positions (cos and sin are [positions][head_dim / 2], first half paired with second); q is left in place, k and v go
// to the slots of the step.
BNY_API void bny_rope_write(
    const bny_kv* kv, const bny_step* step, float* qkv, int64_t ld, const int64_t* positions, const float* cos, const float* sin,
    const float* q_norm, const float* k_norm, float eps);

// Rows rows[c] of x: -inf is added to x[v] where bit v % 32 of bits[c][v / 32] is 0. A NaN stays one.
BNY_API void bny_mask(const int32_t* bits, int64_t words, const int64_t* rows, int64_t C, float* x, int64_t ldx, int64_t V);

#ifdef __cplusplus
}

namespace bny {
// The lowest index of the greatest of n values; -1 where there is NaN or +inf, -2 where all are -inf.
int64_t greedy_id(const float* x, int64_t n);
}  // namespace bny
#endif

#endif

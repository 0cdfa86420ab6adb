#include "small_ops.h"

#include "kv_row.h"
#include "pool.h"
#include "vec.h"

namespace bny {
namespace {

float square_sum(const float* x, int64_t n) {
  vf a = vf_zero(), b = vf_zero();
  int64_t i = 0;
  for (; i + 2 * VL <= n; i += 2 * VL) {
    const vf u = vf_load(x + i), v = vf_load(x + i + VL);
    a = vf_fma(u, u, a), b = vf_fma(v, v, b);
  }
  float rest = 0;
  for (; i < n; i++) rest = std::fma(x[i], x[i], rest);
  return vf_sum(vf_add(a, b)) + rest;
}

void norm_row(const float* x, const float* weight, float eps, float* out, int64_t n) {
  const float factor = 1.0f / std::sqrt(square_sum(x, n) / (float)n + eps);
  int64_t i = 0;
  for (; i + VL <= n; i += VL) vf_store(out + i, vf_mul(vf_mul(vf_load(x + i), vf_set1(factor)), vf_load(weight + i)));
  for (; i < n; i++) out[i] = x[i] * factor * weight[i];
}

void rotate_row(float* x, const float* cos, const float* sin, int64_t half) {
  int64_t i = 0;
  for (; i + VL <= half; i += VL) {
    const vf a = vf_load(x + i), b = vf_load(x + half + i), c = vf_load(cos + i), s = vf_load(sin + i);
    vf_store(x + i, vf_sub(vf_mul(a, c), vf_mul(b, s)));
    vf_store(x + half + i, vf_fma(a, s, vf_mul(b, c)));
  }
  for (; i < half; i++) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cos[i] - b * sin[i];
    x[half + i] = std::fma(a, sin[i], b * cos[i]);
  }
}

BNY_INLINE vf gate(int act, vf x) {
  if (act == BNY_SILU) return vf_div(x, vf_add(vf_set1(1.0f), vf_exp(vf_sub(vf_zero(), x))));
  const vf inner = vf_mul(vf_set1(0.79788456f), vf_fma(vf_mul(vf_mul(x, x), x), vf_set1(0.044715f), x));
  return vf_mul(vf_mul(vf_set1(0.5f), x), vf_add(vf_set1(1.0f), vf_tanh(inner)));
}

float gate_one(int act, float x) {
  if (act == BNY_GELU) return 0.5f * x * (1.0f + std::erf(x * 0.70710678f));
  float out[VL];
  vf_store(out, gate(act, vf_set1(x)));
  return out[0];
}

void act_row(int act, const float* x, float* out, int64_t begin, int64_t end, int64_t inner) {
  int64_t i = begin;
  if (act != BNY_GELU)
    for (; i + VL <= end; i += VL) vf_store(out + i, vf_mul(gate(act, vf_load(x + i)), vf_load(x + inner + i)));
  for (; i < end; i++) out[i] = gate_one(act, x[i]) * x[inner + i];
}

void mask_row(const uint32_t* bits, float* x, int64_t n) {
  for (int64_t w = 0; w * 32 < n; w++, x += 32) {
    const uint32_t word = bits[w];
    if (word == 0xffffffffu) continue;
    if (w * 32 + 32 <= n)
      for (int j = 0; j < 32; j++) x[j] += (word >> j) & 1 ? 0.0f : -INFINITY;
    else
      for (int j = 0; j < n - w * 32; j++) x[j] += (word >> j) & 1 ? 0.0f : -INFINITY;
  }
}

constexpr int64_t FAILED = -1, NO_CHOICE = -2;  // of layers/sampling_input.py

// The greatest of n whole vectors; *finite turns NaN where a value is not finite.
vf greatest_of(const float* x, int64_t n, vf* finite) {
  vf a = vf_set1(-kInf), b = a, c = *finite, d = vf_zero();
  int64_t i = 0;
  for (; i + 2 * VL <= n; i += 2 * VL) {
    const vf u = vf_load(x + i), v = vf_load(x + i + VL);
    a = vf_max(a, u), b = vf_max(b, v);
    c = vf_fma(u, vf_zero(), c), d = vf_fma(v, vf_zero(), d);
  }
  for (; i < n; i += VL) a = vf_max(a, vf_load(x + i)), c = vf_fma(vf_load(x + i), vf_zero(), c);
  *finite = vf_add(c, d);
  return vf_max(a, b);
}

}  // namespace

int64_t greedy_id(const float* x, int64_t n) {
  constexpr int64_t BLOCK = 64 * VL;
  const int64_t whole = n / VL * VL;
  float best = -kInf;
  int64_t at = 0;  // where the first block begins that holds the best
  vf finite = vf_zero();
  for (int64_t i = 0; i < whole; i += BLOCK) {
    const float top = vf_hmax(greatest_of(x + i, std::min(BLOCK, whole - i), &finite));
    if (top > best) best = top, at = i;
  }
  float rest = vf_sum(finite);
  for (int64_t i = whole; i < n; i++) {
    rest += x[i] * 0.0f;
    if (x[i] > best) best = x[i], at = i;
  }
  if (rest != rest)
    for (int64_t i = 0; i < n; i++)
      if (x[i] != x[i] || x[i] == kInf) return FAILED;
  if (best == -kInf) return NO_CHOICE;
  while (x[at] != best) at++;
  return at;
}

}  // namespace bny

extern "C" {

void bny_embed(const void* table, int32_t type, const int64_t* ids, int64_t T, int64_t dim, float scale, float* out, int64_t ldo) {
  bny_parallel_spans(T, T * dim, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      float* to = out + t * ldo;
      if (type == BNY_F32) {
        const float* from = (const float*)table + ids[t] * dim;
        for (int64_t i = 0; i < dim; i++) to[i] = from[i] * scale;
      } else {
        const uint16_t* from = (const uint16_t*)table + ids[t] * dim;
        for (int64_t i = 0; i < dim; i++) to[i] = bf16_to_f32(from[i]) * scale;
      }
    }
  });
}

void bny_norm(const float* x, int64_t ldx, const float* weight, float eps, float* out, int64_t ldo, int64_t T, int64_t dim) {
  bny_parallel_spans(T, T * dim, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) bny::norm_row(x + t * ldx, weight, eps, out + t * ldo, dim);
  });
}

void bny_add_norm(
    const float* x, int64_t ldx, float* sum, int64_t lds, const float* weight, float eps, float* out, int64_t ldo, int64_t T, int64_t dim) {
  bny_parallel_spans(T, T * dim, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      float* to = sum + t * lds;
      for (int64_t i = 0; i < dim; i++) to[i] += x[t * ldx + i];
      bny::norm_row(to, weight, eps, out + t * ldo, dim);
    }
  });
}

void bny_act_mul(int32_t act, const float* x, int64_t ldx, float* out, int64_t ldo, int64_t T, int64_t inner) {
  const int64_t part = 512, parts = (inner + part - 1) / part;
  bny_parallel_spans(T * parts, T * inner * 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t t = i / parts, p = i % parts;
      bny::act_row(act, x + t * ldx, out + t * ldo, p * part, std::min(inner, (p + 1) * part), inner);
    }
  });
}

void bny_rope_write(
    const bny_kv* kv, const bny_step* step, float* qkv, int64_t ld, const int64_t* positions, const float* cos, const float* sin,
    const float* q_norm, const float* k_norm, float eps) {
  const int64_t D = kv->head_dim, half = D / 2, T = step->num_tokens;
  const auto one = [&](int64_t t) {
    const float *c = cos + positions[t] * half, *s = sin + positions[t] * half;
    float* row = qkv + t * ld;
    for (int64_t h = 0; h < kv->heads + kv->kv_heads; h++) {
      float* x = row + h * D;
      const float* weight = h < kv->heads ? q_norm : k_norm;
      if (weight) bny::norm_row(x, weight, eps, x, D);
      bny::rotate_row(x, c, s, half);
    }
    for (int64_t h = 0; h < kv->kv_heads; h++) {
      const int64_t place = step->slots[t] * kv->kv_heads + h;
      bny::write_row(*kv, kv->k, kv->k_scale, place, row + (kv->heads + h) * D);
      bny::write_row(*kv, kv->v, kv->v_scale, place, row + (kv->heads + kv->kv_heads + h) * D);
    }
  };
  bny_parallel_spans(T, T * ld, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) one(t);
  });
}

void bny_mask(const int32_t* bits, int64_t words, const int64_t* rows, int64_t C, float* x, int64_t ldx, int64_t V) {
  bny_parallel_spans(C, C * V / 8, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c++) bny::mask_row((const uint32_t*)bits + c * words, x + rows[c] * ldx, V);
  });
}
}

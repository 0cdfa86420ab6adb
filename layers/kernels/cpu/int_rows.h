// Rows of x as int8.
//
// I8 has one scale per row of x, the others one per row and group of 32 values: a few large activations then spoil only their group.
#ifndef BANYAN_INT_ROWS_H
#define BANYAN_INT_ROWS_H

#include <math.h>

#include "linear.h"

namespace {

// Quantised rows in scratch. A row is int8 [padded_k], then for I8 its scale, else scale [groups] and scale * sum [groups] (of 16
// values where halves is 2: then two sums to a group).
struct IntRows {
  const char* base;
  int64_t stride;  // bytes
  int64_t padded_k;
  int64_t groups;
  const int32_t* words(int64_t row) const { return (const int32_t*)(base + row * stride); }
  const float* scales(int64_t row) const { return (const float*)(base + row * stride + padded_k); }
};

IntRows rows_of(const bny_linear_t* l, const char* base) {
  const int64_t padded = round_up(l->k, GROUP), groups = padded / GROUP;
  return IntRows{base, round_up(padded + (l->kind == BNY_I8 ? 4 : 8 * groups), 64), padded, groups};
}

// The scale of n values, 127 of which are the largest; NaN where a value is not finite, so that the row's results are.
BNY_INLINE float scale_of(const float* x, int64_t n) {
  vf largest_of = vf_zero(), poison_of = vf_zero();
  int64_t i = 0;
  for (; i + VL <= n; i += VL) {
    const vf a = vf_load(x + i);
    largest_of = vf_max(largest_of, vf_max(a, vf_sub(vf_zero(), a)));
    poison_of = vf_fma(a, vf_zero(), poison_of);
  }
  float largest = vf_hmax(largest_of), poison = vf_sum(poison_of);
  for (; i < n; i++) {
    const float a = fabsf(x[i]);
    largest = a > largest ? a : largest;
    poison += a * 0.0f;
  }
  return largest * (1.0f / 127.0f) + poison;
}

// x / scale to nearest even, within -127 and 127; a NaN is -127.
BNY_INLINE vi round_lanes(vf x, vf inverse) {
  const vf magic = vf_set1(12582912.0f);  // 1.5 * 2^23: adding it rounds
  const vf r = vf_max(vf_min(vf_set1(127.0f), vf_mul(x, inverse)), vf_set1(-127.0f));  // of a NaN vf_min is the NaN, vf_max the other
  return vi_sub(vi_bits(vf_add(r, magic)), vi_set1(0x4b400000));
}

// Lanes that fit a byte.
BNY_INLINE void store_bytes(int8_t* out, vi a) {
#if defined(__AVX2__) && !defined(BNY_AVX512)
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  _mm_storel_epi64((__m128i*)out, _mm_packs_epi16(words, words));
#else
  int32_t lanes[VL];
  memcpy(lanes, &a, sizeof lanes);
  for (int i = 0; i < VL; i++) out[i] = (int8_t)lanes[i];
#endif
}

// Rounds x / scale; returns the sum.
BNY_INLINE int32_t round_values(const float* x, int64_t n, float scale, int8_t* out) {
  const vf inverse = vf_set1(scale > 0.0f ? 1.0f / scale : 0.0f);
  vi sums = vi_zero();
  int64_t i = 0;
  for (; i + VL <= n; i += VL) {
    const vi q = round_lanes(vf_load(x + i), inverse);
    sums = vi_add(sums, q);
    store_bytes(out + i, q);
  }
  if (i < n) {
    float rest[VL] = {0};
    int8_t bytes[VL];
    memcpy(rest, x + i, (n - i) * 4);
    const vi q = round_lanes(vf_load(rest), inverse);
    sums = vi_add(sums, q);
    store_bytes(bytes, q);
    memcpy(out + i, bytes, n - i);
  }
  return vi_sum(sums);
}

void quantize_row(const float* x, int64_t k, bool per_group, const IntRows& rows, int64_t row) {
  char* out = (char*)rows.base + row * rows.stride;
  int8_t* values = (int8_t*)out;
  float* scales = (float*)(out + rows.padded_k);
  memset(values + k, 0, rows.padded_k - k);
  if (!per_group) {
    *scales = scale_of(x, k);
    round_values(x, k, *scales, values);
    return;
  }
  for (int64_t g = 0; g < rows.groups; g++) {
    const int64_t at = g * GROUP, n = k - at < GROUP ? k - at : GROUP;
    scales[g] = scale_of(x + at, n);
    scales[rows.groups + g] = scales[g] * (float)round_values(x + at, n, scales[g], values + at);
  }
}

}  // namespace

#endif

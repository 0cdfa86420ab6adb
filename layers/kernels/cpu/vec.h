// What attention and the small ops need beyond simd.h. Each operation rounds once (the build turns contraction off), so that a
// result depends on the instruction set alone and never on how the compiler arranges a loop.
#ifndef BANYAN_VEC_H
#define BANYAN_VEC_H

#include <algorithm>
#include <cmath>
#include <limits>

#include "simd.h"

namespace bny {

constexpr float kInf = std::numeric_limits<float>::infinity();

#if defined(BNY_AVX512)
BNY_INLINE vf vf_round(vf a) { return _mm512_roundscale_ps(a, 8); }
BNY_INLINE vf vf_scale2(vf a, vf n) { return _mm512_scalef_ps(a, n); }
BNY_INLINE vf vf_zero_below(vf a, vf x, float limit) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, vf_set1(limit), _CMP_NLT_UQ), a);
}
BNY_INLINE __m256 vf_halves(vf a) {
  return _mm256_add_ps(_mm512_castps512_ps256(a), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1)));
}
BNY_INLINE void vf_store_sum4(float* out, vf a, vf b, vf c, vf d) {
  const __m256 t = _mm256_hadd_ps(_mm256_hadd_ps(vf_halves(a), vf_halves(b)), _mm256_hadd_ps(vf_halves(c), vf_halves(d)));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1)));
}
#elif defined(__AVX2__)
BNY_INLINE vf vf_round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
BNY_INLINE vf vf_scale2(vf a, vf n) {
  const __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return vf_mul(a, _mm256_castsi256_ps(bits));
}
BNY_INLINE vf vf_zero_below(vf a, vf x, float limit) { return _mm256_and_ps(a, _mm256_cmp_ps(x, vf_set1(limit), _CMP_NLT_UQ)); }
BNY_INLINE void vf_store_sum4(float* out, vf a, vf b, vf c, vf d) {
  const __m256 t = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1)));
}
#else
BNY_INLINE vf vf_round(vf a) { return (vf){nearbyintf(a[0]), nearbyintf(a[1]), nearbyintf(a[2]), nearbyintf(a[3])}; }
BNY_INLINE vf vf_scale2(vf a, vf n) { return vf_mul(a, (vf)((__builtin_convertvector(n, vi) + 127) << 23)); }
BNY_INLINE vf vf_zero_below(vf a, vf x, float limit) { return (vf)((vi)a & ~(vi)(x < vf_set1(limit))); }
BNY_INLINE void vf_store_sum4(float* out, vf a, vf b, vf c, vf d) {
  out[0] = vf_sum(a), out[1] = vf_sum(b), out[2] = vf_sum(c), out[3] = vf_sum(d);
}
#endif
// vf_round: to an integer, ties to even. vf_scale2: a * 2^n for an integral n. vf_zero_below: a, but 0 where x < limit.
// vf_store_sum4: the sums of four vectors, each added up in the same order.

// vf_exp of what is not above 0.
BNY_INLINE vf vf_exp_negative(vf x) {
  const vf c = vf_max(vf_set1(-87.4f), x);
  const vf n = vf_round(vf_mul(c, vf_set1(1.44269504f)));
  const vf r = vf_fma(n, vf_set1(2.12194440e-4f), vf_fma(n, vf_set1(-0.693359375f), c));
  vf p = vf_set1(1.9875691500e-4f);
  p = vf_fma(p, r, vf_set1(1.3981999507e-3f));
  p = vf_fma(p, r, vf_set1(8.3334519073e-3f));
  p = vf_fma(p, r, vf_set1(4.1665795894e-2f));
  p = vf_fma(p, r, vf_set1(1.6666665459e-1f));
  p = vf_fma(p, r, vf_set1(5.0000001201e-1f));
  p = vf_add(vf_fma(vf_mul(p, r), r, r), vf_set1(1.0f));
  return vf_zero_below(vf_scale2(p, n), x, -87.3f);
}

// exp to within 2 ulp: exactly 1 at 0, 0 below -87.3, NaN for NaN. Cody and Waite's reduction, a minimax polynomial of degree 6.
BNY_INLINE vf vf_exp(vf x) { return vf_exp_negative(vf_min(vf_set1(88.0f), x)); }

BNY_INLINE float exp1(float x) {
  float out[VL];
  vf_store(out, vf_exp(vf_set1(x)));
  return out[0];
}

BNY_INLINE vf vf_tanh(vf x) {  // to 1e-7, absolutely
  const vf e = vf_exp(vf_min(vf_set1(40.0f), vf_add(x, x)));
  return vf_sub(vf_set1(1.0f), vf_div(vf_set1(2.0f), vf_add(e, vf_set1(1.0f))));
}

}  // namespace bny

#endif

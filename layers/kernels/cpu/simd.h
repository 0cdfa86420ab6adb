// One vector of floats (vf, VL lanes) and one of as many int32 (vi), for the instruction set that is compiled for.
#ifndef BANYAN_SIMD_H
#define BANYAN_SIMD_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define BNY_INLINE static inline __attribute__((always_inline))

// BNY_EMULATED (1: avx512, 2: avx512_bf16) is for tests: the code of AVX-512 over functions that do the same on any CPU.
#if defined(__AVX512BW__) || defined(BNY_EMULATED)
#define BNY_AVX512 1
#endif
#if defined(BNY_EMULATED) ? BNY_EMULATED == 2 : defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define BNY_ISA "avx512_bf16"
#define BNY_DOT_BF16 1
#define BNY_VNNI 1
#elif defined(BNY_AVX512)
#define BNY_ISA "avx512"
#elif defined(__AVX2__)
#define BNY_ISA "avx2"
#else
#define BNY_ISA "generic"
#endif

// Has a vector used up before the next one is made, where there are registers for one: compilers order anew, and spill.
#if defined(__AVX2__) && !defined(BNY_EMULATED)
#define BNY_USE_NOW(a) __asm__ volatile("" : "+v"(a))
#else
#define BNY_USE_NOW(a) (void)(a)
#endif

enum { LINE = 64 };  // bytes that come from memory together

// --- scalars

BNY_INLINE float bf16_to_f32(uint16_t h) {
  uint32_t u = (uint32_t)h << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

// To nearest, ties to even; a NaN stays one.
BNY_INLINE uint16_t f32_to_bf16(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40);
  return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

BNY_INLINE float f16_to_f32(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff, u;
  float f;
  if (rest >= 0x7c00) {
    u = sign | 0x7f800000u | (rest & 0x3ff) << 13;
  } else if (rest < 0x400) {  // zero or subnormal: rest * 2^-24
    f = (float)rest * 5.9604644775390625e-8f;
    memcpy(&u, &f, 4);
    u |= sign;
  } else {
    u = sign | ((rest << 13) + 0x38000000u);
  }
  memcpy(&f, &u, 4);
  return f;
#endif
}

// To nearest, ties to even; for finite values.
BNY_INLINE uint16_t f32_to_f16(float f) {
#if defined(__F16C__)
  return (uint16_t)_cvtss_sh(f, 0);
#else
  uint32_t u;
  memcpy(&u, &f, 4);
  uint16_t sign = (uint16_t)(u >> 16 & 0x8000);
  u &= 0x7fffffffu;
  if (u >= 0x477ff000u) return (uint16_t)(sign | 0x7c00);
  if (u < 0x38800000u) {  // below the smallest normal: the addition rounds at 2^-24
    float a;
    memcpy(&a, &u, 4);
    a += 0.5f;
    memcpy(&u, &a, 4);
    return (uint16_t)(sign | (u - 0x3f000000u));
  }
  return (uint16_t)(sign | ((u - 0x38000000u + 0xfffu + ((u >> 13) & 1)) >> 13));
#endif
}

// --- vectors: load and store are unaligned; fma(a, b, c) is a * b + c; max(a, b) and min(a, b) are b where one is a NaN

#if defined(BNY_AVX512)
enum { VL = 16 };
typedef __m512 vf;
typedef __m512i vi;
BNY_INLINE vf vf_load(const float* p) { return _mm512_loadu_ps(p); }
BNY_INLINE void vf_store(float* p, vf a) { _mm512_storeu_ps(p, a); }
BNY_INLINE vf vf_set1(float a) { return _mm512_set1_ps(a); }
BNY_INLINE vf vf_zero(void) { return _mm512_setzero_ps(); }
BNY_INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
BNY_INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
BNY_INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
BNY_INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
BNY_INLINE vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
BNY_INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
BNY_INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
BNY_INLINE vf vf_from_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
BNY_INLINE vf vf_from_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
BNY_INLINE vf vf_from_i8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
BNY_INLINE vf vf_from_u8(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
BNY_INLINE vf vf_from_vi(vi a) { return _mm512_cvtepi32_ps(a); }
BNY_INLINE vi vi_load(const void* p) { return _mm512_loadu_si512(p); }
BNY_INLINE vi vi_zero(void) { return _mm512_setzero_si512(); }
BNY_INLINE vi vi_set1(int32_t a) { return _mm512_set1_epi32(a); }
BNY_INLINE vi vi_bits(vf a) { return _mm512_castps_si512(a); }
BNY_INLINE vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
BNY_INLINE vi vi_sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
// Of every 32-bit word its low or high half, as a bfloat16.
BNY_INLINE vf vf_low_bf16(vi a) { return _mm512_castsi512_ps(_mm512_slli_epi32(a, 16)); }
BNY_INLINE vf vf_high_bf16(vi a) { return _mm512_castsi512_ps(_mm512_and_si512(a, _mm512_set1_epi32((int)0xffff0000))); }

#elif defined(__AVX2__)
enum { VL = 8 };
typedef __m256 vf;
typedef __m256i vi;
BNY_INLINE vf vf_load(const float* p) { return _mm256_loadu_ps(p); }
BNY_INLINE void vf_store(float* p, vf a) { _mm256_storeu_ps(p, a); }
BNY_INLINE vf vf_set1(float a) { return _mm256_set1_ps(a); }
BNY_INLINE vf vf_zero(void) { return _mm256_setzero_ps(); }
BNY_INLINE vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
BNY_INLINE vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
BNY_INLINE vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
BNY_INLINE vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
BNY_INLINE vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
BNY_INLINE vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
BNY_INLINE vf vf_min(vf a, vf b) { return _mm256_min_ps(a, b); }
BNY_INLINE vf vf_from_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
BNY_INLINE vf vf_from_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
BNY_INLINE vf vf_from_i8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
BNY_INLINE vf vf_from_u8(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
BNY_INLINE vf vf_from_vi(vi a) { return _mm256_cvtepi32_ps(a); }
BNY_INLINE vi vi_load(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
BNY_INLINE vi vi_zero(void) { return _mm256_setzero_si256(); }
BNY_INLINE vi vi_set1(int32_t a) { return _mm256_set1_epi32(a); }
BNY_INLINE vi vi_bits(vf a) { return _mm256_castps_si256(a); }
BNY_INLINE vi vi_add(vi a, vi b) { return _mm256_add_epi32(a, b); }
BNY_INLINE vi vi_sub(vi a, vi b) { return _mm256_sub_epi32(a, b); }
BNY_INLINE vf vf_low_bf16(vi a) { return _mm256_castsi256_ps(_mm256_slli_epi32(a, 16)); }
BNY_INLINE vf vf_high_bf16(vi a) { return _mm256_castsi256_ps(_mm256_and_si256(a, _mm256_set1_epi32((int)0xffff0000))); }

#else  // four lanes by the compiler's vector types: SSE2, NEON, or whatever there is
enum { VL = 4 };
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef uint32_t vu __attribute__((vector_size(16)));
BNY_INLINE vf vf_load(const float* p) {
  vf a;
  memcpy(&a, p, 16);
  return a;
}
BNY_INLINE void vf_store(float* p, vf a) { memcpy(p, &a, 16); }
BNY_INLINE vf vf_set1(float a) { return (vf){a, a, a, a}; }
BNY_INLINE vf vf_zero(void) { return vf_set1(0.0f); }
BNY_INLINE vf vf_fma(vf a, vf b, vf c) {
#if defined(__ARM_NEON)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
BNY_INLINE vf vf_add(vf a, vf b) { return a + b; }
BNY_INLINE vf vf_sub(vf a, vf b) { return a - b; }
BNY_INLINE vf vf_mul(vf a, vf b) { return a * b; }
BNY_INLINE vf vf_div(vf a, vf b) { return a / b; }
BNY_INLINE vf vf_max(vf a, vf b) { return a > b ? a : b; }
BNY_INLINE vf vf_min(vf a, vf b) { return a < b ? a : b; }
BNY_INLINE vf vf_from_bf16(const uint16_t* p) { return (vf){bf16_to_f32(p[0]), bf16_to_f32(p[1]), bf16_to_f32(p[2]), bf16_to_f32(p[3])}; }
BNY_INLINE vf vf_from_f16(const uint16_t* p) { return (vf){f16_to_f32(p[0]), f16_to_f32(p[1]), f16_to_f32(p[2]), f16_to_f32(p[3])}; }
BNY_INLINE vf vf_from_i8(const int8_t* p) { return (vf){(float)p[0], (float)p[1], (float)p[2], (float)p[3]}; }
BNY_INLINE vf vf_from_u8(const uint8_t* p) { return (vf){(float)p[0], (float)p[1], (float)p[2], (float)p[3]}; }
BNY_INLINE vf vf_from_vi(vi a) { return __builtin_convertvector(a, vf); }
BNY_INLINE vi vi_load(const void* p) {
  vi a;
  memcpy(&a, p, 16);
  return a;
}
BNY_INLINE vi vi_zero(void) { return (vi){0, 0, 0, 0}; }
BNY_INLINE vi vi_set1(int32_t a) { return (vi){a, a, a, a}; }
BNY_INLINE vi vi_bits(vf a) { return (vi)a; }
BNY_INLINE vi vi_add(vi a, vi b) { return a + b; }
BNY_INLINE vi vi_sub(vi a, vi b) { return a - b; }
BNY_INLINE vf vf_low_bf16(vi a) { return (vf)((vu)a << 16); }
BNY_INLINE vf vf_high_bf16(vi a) { return (vf)((vu)a & 0xffff0000u); }
#endif

BNY_INLINE int32_t vi_sum(vi a) {
  int32_t lanes[VL], sum = 0;
  memcpy(lanes, &a, sizeof lanes);
  for (int i = 0; i < VL; i++) sum += lanes[i];
  return sum;
}

// The sum and the maximum of the lanes, always in the same order.
BNY_INLINE float vf_sum(vf a) {
  float lanes[VL];
  vf_store(lanes, a);
  for (int step = VL / 2; step > 0; step /= 2)
    for (int i = 0; i < step; i++) lanes[i] += lanes[i + step];
  return lanes[0];
}
BNY_INLINE float vf_hmax(vf a) {
  float lanes[VL];
  vf_store(lanes, a);
  for (int step = VL / 2; step > 0; step /= 2)
    for (int i = 0; i < step; i++) lanes[i] = lanes[i] > lanes[i + step] ? lanes[i] : lanes[i + step];
  return lanes[0];
}

#endif

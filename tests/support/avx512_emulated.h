// AVX-512 for the kernels on CPUs that lack it: SIMDe's functions, and here those that it does not have. Included before every source.
#pragma once

#pragma GCC diagnostic ignored "-Wpsabi"
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <immintrin.h>
#include <simde/x86/avx512.h>
#include <simde/x86/avx512/dpbf16.h>
#include <simde/x86/avx512/dpbusd.h>
#include <simde/x86/avx512/roundscale.h>
#include <simde/x86/avx512/scalef.h>
#include <stdint.h>
#include <string.h>

typedef int32_t emulated_i32 __attribute__((vector_size(64)));
typedef float emulated_f32 __attribute__((vector_size(64)));

template <class Element, int BYTES, class Packed>
static inline __m512i emulated_widen(Packed from) {
  Element values[BYTES / sizeof(Element)];
  static_assert(sizeof(values) == sizeof(from), "all of them");
  memcpy(values, &from, sizeof(values));
  emulated_i32 to;
  for (int i = 0; i < 16; i++) to[i] = values[i];
  return (__m512i)to;
}

static inline uint16_t emulated_bf16(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40);
  return (uint16_t)((u + 0x7fffu + (u >> 16 & 1)) >> 16);
}

static inline __m512 emulated_cvtph(__m256i halves) {
  __m256 parts[2] = {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
  __m512 to;
  memcpy(&to, parts, sizeof(to));
  return to;
}

static inline __m512i emulated_cvtne2(__m512 high, __m512 low) {
  float from[32];
  uint16_t values[32];
  memcpy(from, &low, 64), memcpy(from + 16, &high, 64);
  for (int i = 0; i < 32; i++) values[i] = emulated_bf16(from[i]);
  __m512i to;
  memcpy(&to, values, sizeof(to));
  return to;
}

#undef _mm512_madd_epi16  // SIMDe's alias takes another function's arguments
#undef _mm512_cvtepi32_ps
#undef _mm512_cvtepi8_epi32
#undef _mm512_cvtepu8_epi32
#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtph_ps
#undef _mm512_cvtne2ps_pbh
#define _mm512_madd_epi16(a, b) simde_mm512_madd_epi16(a, b)
#define _mm512_cvtepi32_ps(a) ((__m512) __builtin_convertvector((emulated_i32)(a), emulated_f32))
#define _mm512_cvtepi8_epi32(a) emulated_widen<int8_t, 16>(a)
#define _mm512_cvtepu8_epi32(a) emulated_widen<uint8_t, 16>(a)
#define _mm512_cvtepu16_epi32(a) emulated_widen<uint16_t, 32>(a)
#define _mm512_cvtph_ps(a) emulated_cvtph(a)
#define _mm512_cvtne2ps_pbh(a, b) emulated_cvtne2(a, b)

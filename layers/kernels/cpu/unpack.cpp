// The values that the kernels multiply by.
#include "linear.h"

namespace {

float nibble(const char* values, int64_t c, int64_t i) {  // value i of 32
  const uint8_t byte = ((const uint8_t*)values)[(i % 16 / 4 * NR + c) * 4 + i % 4];
  return (float)(i < 16 ? byte & 15 : byte >> 4);
}

float byte_at(const char* values, int64_t c, int64_t i) { return (float)((const int8_t*)values)[(i / 4 * NR + c) * 4 + i % 4]; }

float half(const char* halves, int64_t c) { return f16_to_f32(((const uint16_t*)halves)[c]); }

float value(int32_t kind, const char* p, int64_t c, int64_t i) {
  switch (kind) {
    case BNY_F32: return ((const float*)p)[i * NR + c];
    case BNY_BF16: return bf16_to_f32(((const uint16_t*)p)[(i / 2 * NR + c) * 2 + i % 2]);
    case BNY_I8: return byte_at(p + 8 * NR, c, i) * ((const float*)p)[c];
    case BNY_Q4: {
      p += i / GROUP * Q4_BYTES;
      const float scaled = nibble(p + 4 * NR, c, i % GROUP) * half(p, c);
      return scaled + half(p + 2 * NR, c);
    }
    case BNY_Q8: p += i / GROUP * Q8_BYTES; return byte_at(p + 2 * NR, c, i % GROUP) * half(p, c);
    case BNY_Q4K: {
      p += i / BLOCK_K * Q4K_BYTES;
      const int64_t g = i % BLOCK_K / GROUP;
      const float scale = half(p, c) * (float)((const uint8_t*)p)[(4 + g) * NR + c];
      const float low = half(p + 2 * NR, c) * (float)((const uint8_t*)p)[(12 + g) * NR + c];
      const float scaled = nibble(p + (20 + 16 * g) * NR, c, i % GROUP) * scale;
      return scaled - low;
    }
    default: {
      p += i / BLOCK_K * Q6K_BYTES;
      const float scale = half(p, c) * (float)((const int8_t*)p)[(2 + i % BLOCK_K / 16) * NR + c];
      return byte_at(p + 18 * NR, c, i % BLOCK_K) * scale;
    }
  }
}

}  // namespace

extern "C" void bny_unpack(const bny_linear_t* l, float* w) {
  const int64_t stride = panel_bytes(l->kind, l->k);
  for (int64_t n = 0; n < l->n; n++)
    for (int64_t i = 0; i < l->k; i++) w[n * l->k + i] = value(l->kind, (const char*)l->data + n / NR * stride, n % NR, i);
}

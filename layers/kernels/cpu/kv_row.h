// How a row of K or V lies in the pool.
#ifndef BANYAN_KV_ROW_H
#define BANYAN_KV_ROW_H

#include "attention.h"
#include "vec.h"

namespace bny {

BNY_INLINE int element_size(int type) { return type == BNY_KV_F32 ? 4 : type == BNY_KV_BF16 ? 2 : 1; }

// One row [head_dim] to place, slot * kv_heads + head. int8: symmetric, with the scale that maps the greatest to 127.
static inline void write_row(const bny_kv& kv, void* base, float* scales, int64_t place, const float* x) {
  const int D = kv.head_dim;
  if (kv.type == BNY_KV_F32) {
    memcpy((float*)base + place * D, x, sizeof(float) * D);
  } else if (kv.type == BNY_KV_BF16) {
    uint16_t* to = (uint16_t*)base + place * D;
    for (int d = 0; d < D; d++) to[d] = f32_to_bf16(x[d]);
  } else {
    float top = 0;
    for (int d = 0; d < D; d++) top = std::max(top, std::fabs(x[d]));
    const float inverse = top > 0 ? 127.0f / top : 0.0f;
    int8_t* to = (int8_t*)base + place * D;
    scales[place] = top / 127.0f;
    for (int d = 0; d < D; d++) to[d] = (int8_t)std::nearbyint(x[d] * inverse);
  }
}

}  // namespace bny

#endif

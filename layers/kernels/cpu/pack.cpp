// From row-major weights, and from the blocks of GGUF files, to the layouts of linear.h.
#include <math.h>

#include "linear.h"
#include "pool.h"

namespace {

// Values of a panel, channels the faster index, `step` consecutive columns of a channel together; zeros behind the last row.
template <class T, class Get>
void pack_values(T* out, int64_t rows, int64_t k, int step, const Get& get) {
  for (int64_t at = 0; at < k; at += step)
    for (int c = 0; c < NR; c++)
      for (int j = 0; j < step; j++) *out++ = c < rows && at + j < k ? get(c, at + j) : T(0);
}

// 32 numbers below 16 of each channel: low halves of the bytes are the first 16, high halves the rest.
template <class Get>
void pack_nibbles(uint8_t* out, int64_t rows, const Get& get) {
  for (int s = 0; s < 4; s++)
    for (int c = 0; c < NR; c++)
      for (int j = 0; j < 4; j++) *out++ = c < rows ? (uint8_t)(get(c, 4 * s + j) | get(c, 16 + 4 * s + j) << 4) : 0;
}

float clamp(float a, float low, float high) { return a < low ? low : a > high ? high : a; }

void pack_i8(int64_t rows, int64_t k, const float* w, int64_t ldw, char* panel) {
  float* scales = (float*)panel;
  int32_t* sums = (int32_t*)(panel + 4 * NR);
  float inverse[NR] = {0};
  for (int c = 0; c < NR; c++) {
    float largest = 0.0f;
    for (int64_t i = 0; c < rows && i < k; i++) largest = fmaxf(largest, fabsf(w[c * ldw + i]));
    scales[c] = largest / 127.0f;
    inverse[c] = scales[c] > 0.0f ? 1.0f / scales[c] : 0.0f;
    sums[c] = 0;
  }
  pack_values((int8_t*)panel + 8 * NR, rows, k, 4, [&](int c, int64_t i) {
    const int8_t q = (int8_t)clamp(rintf(w[c * ldw + i] * inverse[c]), -127.0f, 127.0f);
    sums[c] += q;
    return q;
  });
}

void pack_q4(int64_t rows, int64_t k, const float* w, int64_t ldw, char* panel) {
  for (int64_t at = 0; at < k; at += GROUP, panel += Q4_BYTES) {
    uint16_t *d = (uint16_t*)panel, *m = d + NR;
    float inverse[NR], low[NR];
    auto value = [&](int c, int64_t i) { return at + i < k ? w[c * ldw + at + i] : 0.0f; };
    for (int c = 0; c < NR; c++) {
      float least = c < rows ? value(c, 0) : 0.0f, most = least;
      for (int i = 1; c < rows && i < GROUP; i++) least = fminf(least, value(c, i)), most = fmaxf(most, value(c, i));
      d[c] = f32_to_f16((most - least) / 15.0f);
      m[c] = f32_to_f16(least);
      const float scale = f16_to_f32(d[c]);
      inverse[c] = scale > 0.0f ? 1.0f / scale : 0.0f;
      low[c] = f16_to_f32(m[c]);
    }
    pack_nibbles((uint8_t*)panel + 4 * NR, rows, [&](int c, int i) {
      return (uint8_t)clamp(rintf((value(c, i) - low[c]) * inverse[c]), 0.0f, 15.0f);
    });
  }
}

void pack_q8(int64_t rows, int64_t k, const float* w, int64_t ldw, char* panel) {
  for (int64_t at = 0; at < k; at += GROUP, panel += Q8_BYTES) {
    const int64_t n = k - at < GROUP ? k - at : GROUP;
    float inverse[NR];
    for (int c = 0; c < NR; c++) {
      float largest = 0.0f;
      for (int64_t i = 0; c < rows && i < n; i++) largest = fmaxf(largest, fabsf(w[c * ldw + at + i]));
      ((uint16_t*)panel)[c] = f32_to_f16(largest / 127.0f);
      const float scale = f16_to_f32(((uint16_t*)panel)[c]);
      inverse[c] = scale > 0.0f ? 1.0f / scale : 0.0f;
    }
    pack_values((int8_t*)panel + 2 * NR, rows, GROUP, 4, [&](int c, int64_t i) {
      return i < n ? (int8_t)clamp(rintf(w[c * ldw + at + i] * inverse[c]), -127.0f, 127.0f) : (int8_t)0;
    });
  }
}

void pack_panel(int32_t kind, int64_t rows, int64_t k, const float* w, int64_t ldw, char* panel) {
  switch (kind) {
    case BNY_F32: pack_values((float*)panel, rows, k, 1, [&](int c, int64_t i) { return w[c * ldw + i]; }); break;
    case BNY_BF16: pack_values((uint16_t*)panel, rows, k, 2, [&](int c, int64_t i) { return f32_to_bf16(w[c * ldw + i]); }); break;
    case BNY_I8: pack_i8(rows, k, w, ldw, panel); break;
    case BNY_Q8: pack_q8(rows, k, w, ldw, panel); break;
    default: pack_q4(rows, k, w, ldw, panel); break;
  }
}

uint16_t half_at(const uint8_t* p) { return (uint16_t)(p[0] | p[1] << 8); }

// One block of each channel; block(c) is where it lies in the file.
template <class Block>
void pack_q4_block(int32_t type, int64_t rows, const Block& block, char* out) {
  const int head = type == 2 ? 2 : 4;
  for (int c = 0; c < NR; c++) {
    const uint16_t d = c < rows ? half_at(block(c)) : 0;
    ((uint16_t*)out)[c] = d;
    ((uint16_t*)out)[NR + c] = c >= rows ? 0 : type == 2 ? f32_to_f16(-8.0f * f16_to_f32(d)) : half_at(block(c) + 2);
  }
  pack_nibbles((uint8_t*)out + 4 * NR, rows, [&](int c, int i) {
    const uint8_t byte = block(c)[head + i % 16];
    return (uint8_t)(i < 16 ? byte & 15 : byte >> 4);
  });
}

template <class Block>
void pack_q8_block(int64_t rows, const Block& block, char* out) {
  for (int c = 0; c < NR; c++) ((uint16_t*)out)[c] = c < rows ? half_at(block(c)) : 0;
  pack_values((int8_t*)out + 2 * NR, rows, GROUP, 4, [&](int c, int64_t i) { return (int8_t)block(c)[2 + i]; });
}

// 6-bit scales and minima of 8 groups in 12 bytes: see model_executor/gguf_quants.py.
template <class Block>
void pack_q4k_block(int64_t rows, const Block& block, char* out) {
  uint8_t *sc = (uint8_t*)out + 4 * NR, *mn = sc + 8 * NR;
  for (int c = 0; c < NR; c++) {
    ((uint16_t*)out)[c] = c < rows ? half_at(block(c)) : 0;
    ((uint16_t*)out)[NR + c] = c < rows ? half_at(block(c) + 2) : 0;
    for (int g = 0; g < 8; g++) {
      const uint8_t* p = c < rows ? block(c) + 4 : nullptr;
      sc[g * NR + c] = !p ? 0 : g < 4 ? p[g] & 63 : (p[g + 4] & 15) | p[g - 4] >> 6 << 4;
      mn[g * NR + c] = !p ? 0 : g < 4 ? p[g + 4] & 63 : p[g + 4] >> 4 | p[g] >> 6 << 4;
    }
  }
  for (int g = 0; g < 8; g++)  // two groups share 32 bytes: low halves, high halves
    pack_nibbles((uint8_t*)out + (20 + 16 * g) * NR, rows, [&](int c, int i) {
      const uint8_t byte = block(c)[16 + g / 2 * 32 + i];
      return (uint8_t)(g % 2 ? byte >> 4 : byte & 15);
    });
}

template <class Block>
void pack_q6k_block(int64_t rows, const Block& block, char* out) {
  for (int c = 0; c < NR; c++) {
    ((uint16_t*)out)[c] = c < rows ? half_at(block(c) + 208) : 0;
    for (int g = 0; g < 16; g++) ((int8_t*)out)[(2 + g) * NR + c] = c < rows ? (int8_t)block(c)[192 + g] : 0;
  }
  pack_values((int8_t*)out + 18 * NR, rows, BLOCK_K, 4, [&](int c, int64_t i) {
    // a half of 128 values is 64 bytes of low bits (values j and j + 64 share one) and 32 of high bits (four to a byte)
    const int64_t half = i / 128, j = i % 128;
    const uint8_t low = block(c)[half * 64 + j % 64], high = block(c)[128 + half * 32 + j % 32];
    return (int8_t)(((j < 64 ? low & 15 : low >> 4) | (high >> (j / 32 * 2) & 3) << 4) - 32);
  });
}

struct FileBlock {
  int values, bytes, packed;
  int32_t kind;
};

FileBlock file_block(int32_t type) {
  switch (type) {
    case 2: return {32, 18, Q4_BYTES, BNY_Q4};
    case 3: return {32, 20, Q4_BYTES, BNY_Q4};
    case 8: return {32, 34, Q8_BYTES, BNY_Q8};
    case 12: return {256, 144, Q4K_BYTES, BNY_Q4K};
    default: return {256, 210, Q6K_BYTES, BNY_Q6K};
  }
}

}  // namespace

extern "C" void bny_pack_f32(int32_t kind, int64_t n, int64_t k, const float* w, int64_t ldw, void* data) {
  const int64_t stride = panel_bytes(kind, k);
  bny_parallel(bny_threads(n * k), div_up(n, NR), [&](int64_t p) {
    pack_panel(kind, n - p * NR < NR ? n - p * NR : NR, k, w + p * NR * ldw, ldw, (char*)data + p * stride);
  });
}

extern "C" void bny_pack_bf16(int64_t n, int64_t k, const uint16_t* w, int64_t ldw, void* data) {
  const int64_t stride = panel_bytes(BNY_BF16, k);
  bny_parallel(bny_threads(n * k), div_up(n, NR), [&](int64_t p) {
    const uint16_t* from = w + p * NR * ldw;
    pack_values((uint16_t*)((char*)data + p * stride), n - p * NR, k, 2, [&](int c, int64_t i) { return from[c * ldw + i]; });
  });
}

extern "C" void bny_pack_gguf(int32_t type, int64_t n, int64_t k, const uint8_t* blocks, void* data) {
  const FileBlock b = file_block(type);
  const int64_t stride = panel_bytes(b.kind, k), count = k / b.values;
  bny_parallel(bny_threads(n * k), div_up(n, NR), [&](int64_t p) {
    const int64_t rows = n - p * NR < NR ? n - p * NR : NR;
    for (int64_t at = 0; at < count; at++) {
      char* out = (char*)data + p * stride + at * b.packed;
      auto block = [&](int c) { return blocks + ((p * NR + c) * count + at) * b.bytes; };
      switch (type) {
        case 2:
        case 3: pack_q4_block(type, rows, block, out); break;
        case 8: pack_q8_block(rows, block, out); break;
        case 12: pack_q4k_block(rows, block, out); break;
        default: pack_q6k_block(rows, block, out); break;
      }
    }
  });
}

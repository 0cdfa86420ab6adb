// From row-major weights to the layouts of linear.h, and back.
#include "linear.h"

namespace {

// Value of channel c (of NR) and column k in the panels that hold whole numbers or floats plainly.
template <class T, class Get>
void pack_pairs(T* panel, int64_t rows, int64_t k, int step, const Get& get) {
  for (int64_t at = 0; at < k; at += step)
    for (int c = 0; c < NR; c++)
      for (int j = 0; j < step; j++) *panel++ = c < rows && at + j < k ? get(c, at + j) : T(0);
}

void pack_panel(int32_t kind, int64_t rows, int64_t k, const float* w, int64_t ldw, char* panel) {
  switch (kind) {
    case BNY_F32: pack_pairs((float*)panel, rows, k, 1, [&](int c, int64_t i) { return w[c * ldw + i]; }); break;
    case BNY_BF16: pack_pairs((uint16_t*)panel, rows, k, 2, [&](int c, int64_t i) { return f32_to_bf16(w[c * ldw + i]); }); break;
    default: break;
  }
}

}  // namespace

extern "C" void bny_pack_f32(int32_t kind, int64_t n, int64_t k, const float* w, int64_t ldw, void* data) {
  const int64_t stride = panel_bytes(kind, k);
#pragma omp parallel for schedule(static) num_threads(bny_threads(n* k))
  for (int64_t p = 0; p < div_up(n, NR); p++)
    pack_panel(kind, n - p * NR < NR ? n - p * NR : NR, k, w + p * NR * ldw, ldw, (char*)data + p * stride);
}

extern "C" void bny_pack_bf16(int64_t n, int64_t k, const uint16_t* w, int64_t ldw, void* data) {
  const int64_t stride = panel_bytes(BNY_BF16, k);
#pragma omp parallel for schedule(static) num_threads(bny_threads(n* k))
  for (int64_t p = 0; p < div_up(n, NR); p++) {
    const uint16_t* from = w + p * NR * ldw;
    pack_pairs((uint16_t*)((char*)data + p * stride), n - p * NR, k, 2, [&](int c, int64_t i) { return from[c * ldw + i]; });
  }
}

namespace {

void unpack_panel(int32_t kind, int64_t rows, int64_t k, const char* panel, float* w) {
  for (int64_t c = 0; c < rows; c++)
    for (int64_t i = 0; i < k; i++) switch (kind) {
        case BNY_F32: w[c * k + i] = ((const float*)panel)[i * NR + c]; break;
        case BNY_BF16: w[c * k + i] = bf16_to_f32(((const uint16_t*)panel)[(i / 2 * NR + c) * 2 + i % 2]); break;
        default: break;
      }
}

}  // namespace

extern "C" void bny_unpack(const bny_linear_t* l, float* w) {
  const int64_t stride = panel_bytes(l->kind, l->k);
  for (int64_t p = 0; p < div_up(l->n, NR); p++)
    unpack_panel(l->kind, l->n - p * NR < NR ? l->n - p * NR : NR, l->k, (const char*)l->data + p * stride, w + p * NR * l->k);
}

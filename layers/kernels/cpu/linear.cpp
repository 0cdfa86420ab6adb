// bny_linear: the region, and the chain of its links.
#include "linear.h"

static bool is_float(int32_t kind) { return kind == BNY_F32 || kind == BNY_BF16; }

extern "C" int64_t bny_linear_bytes(int32_t kind, int64_t n, int64_t k) {
  int64_t panel = n > 0 && k > 0 ? panel_bytes(kind, k) : -1;
  return panel < 0 ? -1 : div_up(n, NR) * panel;
}

extern "C" int64_t bny_linear_scratch(const bny_linear_t* l, int64_t m) {
  int64_t most = 0;
  for (; l; l = l->next) {
    int64_t need = is_float(l->kind) ? float_scratch(l, m) : int_scratch(l, m);
    most = need > most ? need : most;
  }
  return most;
}

extern "C" void bny_linear(const bny_linear_t* l, const float* x, int64_t ldx, float* y, int64_t ldy, int64_t m, void* scratch) {
  for (; l; y += l->n, l = l->next) {
    if (is_float(l->kind)) {
      float_rows(l, x, ldx, y, ldy, m, scratch);
    } else {
      int_rows(l, x, ldx, y, ldy, m, scratch);
    }
  }
}

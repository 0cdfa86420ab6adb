// What the machine can do at most, for benchmarks; and what the library is.
#include "kernels.h"

#include <atomic>

#include "pool.h"
#include "simd.h"

extern "C" int32_t bny_abi(void) { return BNY_ABI; }
extern "C" const char* bny_isa(void) { return BNY_ISA; }

extern "C" uint64_t bny_read_memory(const void* data, int64_t bytes) {
  const uint64_t* words = (const uint64_t*)data;
  std::atomic<uint64_t> sum{0};
  bny_parallel_spans(bytes / 64, bytes, [&](int64_t begin, int64_t end) {
    uint64_t lanes[8] = {0};
    for (int64_t i = begin * 8; i < end * 8; i += 8)
      for (int j = 0; j < 8; j++) lanes[j] ^= words[i + j];
    for (int j = 0; j < 8; j++) sum ^= lanes[j];
  });
  return sum;
}

extern "C" double bny_peak_flops(int64_t rounds, float* sink) {
  std::atomic<int64_t> all{0};
  bny_parallel_spans(rounds * omp_get_max_threads(), rounds * 160, [&](int64_t begin, int64_t end) {
    vf acc[10];
    for (int i = 0; i < 10; i++) acc[i] = vf_set1((float)i);
    vf a = vf_set1(0.999f), b = vf_set1(1e-3f);
    for (int64_t r = begin; r < end; r++) {
#pragma GCC unroll 10
      for (int i = 0; i < 10; i++) acc[i] = vf_fma(acc[i], a, b);
    }
    for (int i = 1; i < 10; i++) acc[0] = vf_add(acc[0], acc[i]);
    if (vf_sum(acc[0]) > 1e30f) *sink = 1;  // never, but it must be computed
    all += end - begin;
  });
  return 2.0 * VL * 10 * (double)all.load();
}

// Sampling: the meaning of layers/sampler.py, in double precision.
#ifndef BANYAN_SAMPLE_H
#define BANYAN_SAMPLE_H

#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

// [S] each; those of layers/sampling_input.py.
typedef struct bny_sampling {
  const float* temperature;  // below 1e-6: greedy
  const float* top_p;        // (0, 1]
  const float* min_p;        // [0, 1]
  const int32_t* top_k;      // at least 1; 1: greedy
  const int64_t* seed;       // with the position it determines the draw
  const int64_t* position;
} bny_sampling;

// ids[s] = what row s of x samples; -1 where the row holds NaN or +inf, -2 where all of it is -inf. V is below 2^31. Everything behind
// z = (x - greatest) / temperature is double and of one order on every instruction set: so are the ids, bit for bit, of equal x.
BNY_API void bny_sample(const bny_sampling* sampling, const float* x, int64_t ldx, int64_t* ids, int64_t S, int64_t V);

#ifdef __cplusplus
}
#endif

#endif

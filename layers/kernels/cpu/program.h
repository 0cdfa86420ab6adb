// A forward pass as one call: the ops of all layers, recorded once, run for any number of tokens.
#ifndef BANYAN_PROGRAM_H
#define BANYAN_PROGRAM_H

#include "attention.h"

#ifdef __cplusplus
extern "C" {
#endif

enum bny_op_kind {
  BNY_OP_EMBED = 0,       // dst = rows of p0 at the ids; type: of the table; number: scale
  BNY_OP_NORM = 1,        // dst = norm(src), weight p0; number: eps
  BNY_OP_ADD_NORM = 2,    // sum += src, dst = norm(sum), weight p0; number: eps
  BNY_OP_LINEAR = 3,      // dst = src p0^T, a bny_linear_t
  BNY_OP_ROPE_WRITE = 4,  // in src: see bny_rope_write; p0 a bny_kv, p1 cos, p2 sin, p3 and p4 norms of q and k or NULL; number: eps
  BNY_OP_ATTENTION = 5,   // dst = attention from the q in src; p0 a bny_kv
  BNY_OP_ACT_MUL = 6      // dst = act(first half of src) * second half; type: of act
};

typedef struct bny_op {
  int32_t kind, type;
  int32_t src, dst, sum;  // buffers
  float number;
  const void* p[5];
} bny_op;

typedef struct bny_program {
  const bny_op* ops;
  const int64_t* widths;   // of each buffer's rows, in floats
  float* const* buffers;   // [num_tokens][width] each
  void* scratch;           // for linears, 64-byte aligned
  double* seconds;         // [num_ops], the time of each op is added; or NULL
  const int32_t* stop;     // once it is not 0 the ops that have not begun are left out; or NULL
  int64_t num_ops;
  int64_t vocab_size, num_positions;
} bny_program;

// Runs the ops over the tokens of a step. Returns -1, or without running any op the first token whose id is outside the vocabulary or
// whose position is outside the tables.
BNY_API int64_t bny_run(const bny_program* program, const bny_step* step, const int64_t* ids, const int64_t* positions);

#ifdef __cplusplus
}
#endif

#endif

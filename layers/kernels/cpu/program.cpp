#include "program.h"

#include <omp.h>

#include "small_ops.h"

namespace {

void run_op(const bny_program& program, const bny_op& op, const bny_step* step, const int64_t* ids, const int64_t* positions) {
  const int64_t T = step->num_tokens, in = program.widths[op.src], out = program.widths[op.dst];
  float *src = program.buffers[op.src], *dst = program.buffers[op.dst];
  const float* weight = (const float*)op.p[0];
  const bny_kv* kv = (const bny_kv*)op.p[0];
  switch (op.kind) {
    case BNY_OP_EMBED: bny_embed(op.p[0], op.type, ids, T, out, op.number, dst, out); break;
    case BNY_OP_NORM: bny_norm(src, in, weight, op.number, dst, out, T, in); break;
    case BNY_OP_ADD_NORM: bny_add_norm(src, in, program.buffers[op.sum], in, weight, op.number, dst, out, T, in); break;
    case BNY_OP_LINEAR: bny_linear((const bny_linear_t*)op.p[0], src, in, dst, out, T, program.scratch); break;
    case BNY_OP_ROPE_WRITE:
      bny_rope_write(kv, step, src, in, positions, (const float*)op.p[1], (const float*)op.p[2], (const float*)op.p[3],
                     (const float*)op.p[4], op.number);
      break;
    case BNY_OP_ATTENTION: bny_attention(kv, step, src, in, dst, out); break;
    case BNY_OP_ACT_MUL: bny_act_mul(op.type, src, in, dst, out, T, out); break;
  }
}

}  // namespace

extern "C" int64_t bny_run(const bny_program* program, const bny_step* step, const int64_t* ids, const int64_t* positions) {
  for (int64_t t = 0; t < step->num_tokens; t++)
    if ((uint64_t)ids[t] >= (uint64_t)program->vocab_size || (uint64_t)positions[t] >= (uint64_t)program->num_positions) return t;
  for (int64_t i = 0; i < program->num_ops; i++) {
    if (program->stop && __atomic_load_n(program->stop, __ATOMIC_RELAXED)) break;
    const double start = program->seconds ? omp_get_wtime() : 0;
    run_op(*program, program->ops[i], step, ids, positions);
    if (program->seconds) program->seconds[i] += omp_get_wtime() - start;
  }
  return -1;
}

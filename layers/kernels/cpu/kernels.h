// The C ABI of the native CPU kernels. Python reads it through ctypes (library.py keeps the same structs), C++ sources include it.
//
// Rules of every kernel here:
// - Activations are float32 in and out. Instruction sets that multiply bfloat16 round them inside a kernel.
// - The library is compiled for one instruction set; nothing is dispatched at run time.
// - A call uses up to the caller's omp_get_max_threads() threads (pool.h), or one where the work is tiny. Call from one thread.
// - The result for a row depends on that row alone: never on how many rows a call has, on their order, or on the number of threads.
// - Nothing is checked here: the caller checks shapes, strides and bounds.
#ifndef BANYAN_KERNELS_H
#define BANYAN_KERNELS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define BNY_API __attribute__((visibility("default")))

// Version of this file's structs and of the packed layouts; library.py refuses another.
#define BNY_ABI 1
BNY_API int32_t bny_abi(void);
// The instruction set compiled for: "generic", "avx2", "avx512", "avx512_bf16".
BNY_API const char* bny_isa(void);
// Reads bytes (a multiple of 64, 64-byte aligned) once, with all threads; returns something that depends on them. Measures memory.
BNY_API uint64_t bny_read_memory(const void* data, int64_t bytes);
// Multiplies and adds in registers, with all threads; returns how many floating point operations ran. Measures the peak.
BNY_API double bny_peak_flops(int64_t rounds, float* sink);

// ---------------------------------------------------------------------------------------------------------------- linears
// y[m][n] = sum over k of x[m][k] * w[n][k], + bias[n].

enum bny_kind {
  BNY_F32 = 0,   // float32
  BNY_BF16 = 1,  // bfloat16, float32 accumulation
  BNY_I8 = 2,    // int8, a float32 scale per channel; activations int8, a scale per token
  BNY_Q4 = 3,    // groups of 32: 4 bits, w = d * q + m, d and m float16 (Q4_0, Q4_1)
  BNY_Q8 = 4,    // groups of 32: int8, w = d * q, d float16 (Q8_0)
  BNY_Q4K = 5,   // blocks of 256: 8 groups of 4 bits, w = (d * sc) * q - dmin * mn (Q4_K)
  BNY_Q6K = 6    // blocks of 256: 16 groups of 16, int8, w = (d * sc) * q (Q6_K)
};
// Activations of the last four are int8 with a scale per token and 32 values.

typedef struct bny_linear {
  int32_t kind;
  int32_t reserved;
  int64_t n, k;                   // rows and columns of the weight
  const void* data;               // packed by bny_pack* of this library, 64-byte aligned
  const float* bias;              // [n] or NULL
  const struct bny_linear* next;  // outputs that follow these n, of the same k but maybe of another kind; or NULL
} bny_linear_t;

// Bytes of the packed weight, -1 where the kind does not exist or k does not fit it.
BNY_API int64_t bny_linear_bytes(int32_t kind, int64_t n, int64_t k);

// Packs a row-major weight [n][k] with ldw elements from row to row. F32, BF16, I8, Q4 and Q8 quantise on the way.
BNY_API void bny_pack_f32(int32_t kind, int64_t n, int64_t k, const float* w, int64_t ldw, void* data);
// The same from bfloat16, kind BF16 only: exact.
BNY_API void bny_pack_bf16(int64_t n, int64_t k, const uint16_t* w, int64_t ldw, void* data);
// Packs n rows of GGUF blocks as they lie in the file, without changing a value. type is ggml's: 2 Q4_0 and 3 Q4_1 (-> Q4),
// 8 Q8_0 (-> Q8), 12 Q4_K (-> Q4K), 14 Q6_K (-> Q6K).
BNY_API void bny_pack_gguf(int32_t type, int64_t n, int64_t k, const uint8_t* blocks, void* data);
// The weight that the kernels multiply by, row-major float32 [n][k]. One link of the chain only.
BNY_API void bny_unpack(const bny_linear_t* linear, float* w);

// Bytes of scratch that bny_linear needs for up to m rows, all links of the chain; 0 if none.
BNY_API int64_t bny_linear_scratch(const bny_linear_t* linear, int64_t m);
// The product for m rows. x rows are ldx floats apart, y rows ldy; y must not overlap x. scratch is 64-byte aligned, or NULL where
// bny_linear_scratch is 0. For every y the order of the additions over k is fixed, so a row's result is the same bits for any m.
BNY_API void bny_linear(const bny_linear_t* linear, const float* x, int64_t ldx, float* y, int64_t ldy, int64_t m, void* scratch);

#ifdef __cplusplus
}
#endif
#endif

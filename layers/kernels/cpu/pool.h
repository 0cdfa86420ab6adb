// The threads of the kernels: work in pieces that whoever is awake takes, one after the other.
//
// A region of OpenMP ends when every thread of its team has come to its barrier, also one that did nothing and waits for a core that
// another process has. Here a call ends when every piece is done: a helper that has no core costs the piece that it holds, or nothing.
// Helpers wait awake for a moment after a call, so that the next one of a forward pass finds them, and then sleep.
#ifndef BANYAN_POOL_H
#define BANYAN_POOL_H

#include <omp.h>
#include <stdint.h>

typedef void (*bny_piece)(const void* context, int64_t index);

// Calls piece(context, i) for every i in [0, count), on the calling thread and up to threads - 1 others, and returns when all are done.
// A call from within a piece, or while another thread's call is under way, runs all pieces itself.
void bny_pool_run(int threads, int64_t count, bny_piece piece, const void* context);

template <class Body>
static inline void bny_parallel(int threads, int64_t count, const Body& body) {
  if (threads <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; i++) body(i);
    return;
  }
  bny_pool_run(threads, count, [](const void* context, int64_t i) { (*(const Body*)context)(i); }, &body);
}

// Threads for so many multiply-adds or so: below a few microseconds of work waking others costs more than it gains.
static inline int bny_threads(int64_t work) { return work < 32768 ? 1 : omp_get_max_threads(); }

// Part t of T of n items: [begin, end).
static inline void bny_share(int64_t n, int64_t t, int64_t T, int64_t* begin, int64_t* end) {
  *begin = n * t / T;
  *end = n * (t + 1) / T;
}

enum { BNY_PIECES = 6 };  // for each thread, where the work has no natural ones

// Calls body(begin, end) for spans of [0, n) that cover it. work: of all, in multiply-adds.
template <class Body>
static inline void bny_parallel_spans(int64_t n, int64_t work, const Body& body) {
  const int threads = bny_threads(work);
  const int64_t most = (int64_t)threads * BNY_PIECES, pieces = threads <= 1 ? 1 : n < most ? n : most;
  bny_parallel(threads, pieces, [&](int64_t i) {
    int64_t begin, end;
    bny_share(n, i, pieces, &begin, &end);
    if (begin < end) body(begin, end);
  });
}

#endif

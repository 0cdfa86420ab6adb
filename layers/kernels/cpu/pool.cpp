#include "pool.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace {

constexpr int MOST_THREADS = 255;
constexpr int64_t HELPER_SPINS = 200, CALLER_SPINS = 50;  // microseconds awake before sleeping

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Waits until ready() for so long at most; whether it is.
template <class Ready>
bool spin(int64_t microseconds, const Ready& ready) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::microseconds(microseconds);
  do {
    for (int i = 0; i < 32; i++) {
      if (ready()) return true;
      relax();
    }
  } while (Clock::now() < end);
  return ready();
}

// Sleepers are woken under the mutex. Whoever goes to sleep says so first and then looks again, whoever wakes changes what is looked
// at first and then looks for sleepers (both sequentially consistent), so that no wake-up is missed.
struct Bell {
  std::mutex mutex;
  std::condition_variable rung;
  std::atomic<int> sleepers{0};

  template <class Ready>
  void sleep(const Ready& ready) {
    std::unique_lock<std::mutex> lock(mutex);
    sleepers++;
    rung.wait(lock, ready);
    sleepers--;
  }
  void ring() {
    if (sleepers.load() == 0) return;
    std::lock_guard<std::mutex> lock(mutex);
    rung.notify_all();
  }
};

// A ticket is [generation 24][threads 8][pieces that nobody has taken 32]: taking one is a change of the whole word, so it can be of no
// other call than the one that was seen. The job's fields change only while no piece of it is taken and not done.
struct Pool {
  alignas(64) std::atomic<uint64_t> ticket{0};
  alignas(64) std::atomic<int64_t> done{0};
  alignas(64) std::atomic<bool> busy{false};
  int64_t count = 0;
  bny_piece piece = nullptr;
  const void* context = nullptr;
  int helpers = 0;
  uint64_t generation = 0;
  Bell idle, finished;
};

Pool* pool = new Pool;  // never freed: helpers outlive the end of main

uint64_t left_of(uint64_t ticket) { return ticket & 0xffffffffu; }
int threads_of(uint64_t ticket) { return (int)(ticket >> 32 & 0xff); }

// Takes and does pieces until none is left for this thread; 0 is the caller, helpers count from 1.
void work(int thread) {
  Pool& p = *pool;
  for (uint64_t seen = p.ticket.load(); left_of(seen) > 0 && thread < threads_of(seen);) {
    if (!p.ticket.compare_exchange_weak(seen, seen - 1)) continue;
    const int64_t count = p.count;
    p.piece(p.context, count - (int64_t)left_of(seen));
    if (p.done.fetch_add(1) + 1 == count) p.finished.ring();
    seen = p.ticket.load();
  }
}

void help(int thread) {
  const auto ready = [thread] {
    const uint64_t seen = pool->ticket.load();
    return left_of(seen) > 0 && thread < threads_of(seen);
  };
  for (;;) {
    if (!spin(HELPER_SPINS, ready)) pool->idle.sleep(ready);
    work(thread);
  }
}

void forget_helpers() { pool = new Pool; }  // in a child of fork, where they are not

// Up to threads - 1 helpers; fewer where the system has no more threads. Signals are for the threads of the process's own.
void hire(int threads) {
  static const int once = pthread_atfork(nullptr, nullptr, forget_helpers);
  (void)once;
  if (pool->helpers >= threads - 1) return;
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (; pool->helpers < threads - 1; pool->helpers++) std::thread(help, pool->helpers + 1).detach();
  } catch (const std::system_error&) {
    // the caller does all pieces that nobody takes
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace

void bny_pool_run(int threads, int64_t count, bny_piece piece, const void* context) {
  Pool& p = *pool;
  if (threads <= 1 || count <= 1 || p.busy.exchange(true)) {
    for (int64_t i = 0; i < count; i++) piece(context, i);
    return;
  }
  threads = threads < MOST_THREADS ? threads : MOST_THREADS;
  hire(threads);
  p.count = count, p.piece = piece, p.context = context;
  p.done = 0;
  p.generation = (p.generation + 1) & 0xffffff;
  p.ticket = p.generation << 40 | (uint64_t)threads << 32 | (uint64_t)count;
  p.idle.ring();
  work(0);
  const auto all_done = [&p] { return p.done.load() == p.count; };
  if (!spin(CALLER_SPINS, all_done)) p.finished.sleep(all_done);
  p.busy = false;
}

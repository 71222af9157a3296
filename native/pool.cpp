#include "pool.h"

#include <chrono>
#include <new>

#if !defined(_WIN32)
#include <pthread.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paceline {

namespace {

// Longer than the Python between two native calls, also of a large batch: who sleeps may lose its core to another process.
constexpr auto kSpin = std::chrono::microseconds(1000);

void relax(int turn) {
  if (turn % 64 == 63) {
    std::this_thread::yield();  // fewer cores than threads: let the other one run
    return;
  }
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

constexpr int kNone = -1, kOver = -2;

// The next chunk of a share: kNone if none is left, kOver if another run has begun.
int take(std::atomic<uint64_t>& share, uint32_t epoch) {
  uint64_t word = share.load(std::memory_order_acquire);
  for (;;) {
    if (static_cast<uint32_t>(word >> 32) != epoch) return kOver;
    if ((word & 0xffff) >= (word >> 16 & 0xffff)) return kNone;
    if (share.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel, std::memory_order_acquire))
      return static_cast<int>(word & 0xffff);
  }
}

}  // namespace

Pool& Pool::instance() {
  static Pool* pool = [] {
    Pool* made = new Pool;  // never destroyed: its threads may be parked when the process exits
#if !defined(_WIN32)
    pthread_atfork([] { instance().hold(); }, [] { instance().release(); }, [] { instance().begin_again(); });
#endif
    return made;
  }();
  return *pool;
}

void Pool::hold() {
  run_mutex_.lock();
  park_mutex_.lock();
}

void Pool::release() {
  park_mutex_.unlock();
  run_mutex_.unlock();
}

void Pool::begin_again() {
  new std::vector<std::thread>(std::move(workers_));  // threads of the parent: nobody can join them here
  workers_.clear();
  parked_ = 0;
  new (&wake_) std::condition_variable;  // the old one counts those who wait in the parent
  release();
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  {
    std::lock_guard<std::mutex> lock(park_mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
  workers_.clear();
  stopping_ = false;
}

void Pool::resize(int threads) {
  std::lock_guard<std::mutex> lock(run_mutex_);
  if (threads == size()) return;
  stop();
  allot(threads);
  for (int i = 1; i < threads; ++i) workers_.emplace_back(&Pool::work, this, i);
}

void Pool::allot(int threads) {
  done_.reset(new Line[max_steps / 8]);
  shares_.clear();
  for (int i = 0; i < threads; ++i) shares_.emplace_back(new Line[max_steps / 8]);
}

void Pool::run(Job& job, const std::vector<int>& chunks) {
  std::lock_guard<std::mutex> lock(run_mutex_);
  uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
  uint64_t tag = static_cast<uint64_t>(epoch) << 32;
  job_.store(&job, std::memory_order_relaxed);
  steps_.store(static_cast<int>(chunks.size()), std::memory_order_relaxed);
  for (size_t s = 0; s < chunks.size(); ++s) {
    const int step = static_cast<int>(s);
    const uint64_t total = chunks[s], threads = shares_.size();
    at(done_, step).store(tag | total << 16, std::memory_order_relaxed);
    for (uint64_t t = 0; t < threads; ++t) {  // rounded up: a single chunk is the caller's
      uint64_t begin = (t * total + threads - 1) / threads, end = ((t + 1) * total + threads - 1) / threads;
      at(shares_[t], step).store(tag | end << 16 | begin, std::memory_order_release);
    }
  }
  epoch_.store(epoch, std::memory_order_seq_cst);
  if (parked_.load(std::memory_order_seq_cst) > 0) {
    { std::lock_guard<std::mutex> park(park_mutex_); }
    wake_.notify_all();
  }
  walk(epoch, 0);
}

void Pool::walk(uint32_t epoch, int thread) {
  int steps = steps_.load(std::memory_order_relaxed);
  Job* job = job_.load(std::memory_order_relaxed);
  const int threads = static_cast<int>(shares_.size());
  for (int s = 0; s < steps; ++s) {
    uint64_t mine = 0;
    for (int t = 0; t < threads; ++t) {
      std::atomic<uint64_t>& share = at(shares_[(thread + t) % threads], s);
      for (;;) {
        int index = take(share, epoch);
        if (index == kOver) return;
        if (index == kNone) break;
        job->chunk(s, index, thread);  // taken, so the run is alive and `job` is its job
        ++mine;
      }
    }
    std::atomic<uint64_t>& done = at(done_, s);
    if (mine) done.fetch_add(mine, std::memory_order_acq_rel);
    for (int turn = 0;; ++turn) {
      uint64_t word = done.load(std::memory_order_acquire);
      if (static_cast<uint32_t>(word >> 32) != epoch) return;
      if ((word & 0xffff) == (word >> 16 & 0xffff)) break;
      relax(turn);
    }
  }
}

void Pool::work(int thread) {
  uint32_t seen = epoch_.load();
  while (!stopping_) {
    auto until = std::chrono::steady_clock::now() + kSpin;
    for (int turn = 0; epoch_.load(std::memory_order_acquire) == seen && !stopping_; ++turn) {
      relax(turn);
      if (turn % 64 == 63 && std::chrono::steady_clock::now() > until) {
        std::unique_lock<std::mutex> lock(park_mutex_);
        parked_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, [&] { return stopping_ || epoch_.load(std::memory_order_seq_cst) != seen; });
        parked_.fetch_sub(1, std::memory_order_seq_cst);
      }
    }
    seen = epoch_.load(std::memory_order_acquire);
    if (!stopping_) walk(seen, thread);
  }
}

}  // namespace paceline

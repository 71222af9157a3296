// The sum over ranks, processes of one machine, through memory that they share. It is added up in the order of the ranks,
// so that all have the same bits.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>

namespace paceline {

// For each rank a line with the number of its turn, then two slots: while one is read, the next turn fills the other. Who
// fills a slot for the second time has seen all others in the turn between, so they have read it.
struct Exchange {
  static constexpr int64_t line = 64, slot = 256 * 1024;
  static int64_t bytes(int ranks) { return ranks * (line + 2 * slot); }

  char* base;
  int rank, ranks;

  std::atomic<uint64_t>& turn(int of) const { return *reinterpret_cast<std::atomic<uint64_t>*>(base + of * line); }
  float* part(int of, uint64_t now) const {
    return reinterpret_cast<float*>(base + ranks * line + (of * 2 + static_cast<int64_t>(now & 1)) * slot);
  }

  // `count` rows of `width` become the sum; `begin`: they are handed in first. False if a rank has not come within `seconds`.
  bool add(uint64_t now, float* x, int64_t count, int64_t width, int64_t stride, bool begin, double seconds) const {
    const size_t row = width * sizeof(float);
    if (begin) {
      for (int64_t r = 0; r < count; ++r) std::memcpy(part(rank, now) + r * width, x + r * stride, row);
      turn(rank).store(now, std::memory_order_release);
    }
    for (int of = 0; of < ranks; ++of)
      if (!wait(turn(of), now, seconds)) return false;
    for (int64_t r = 0; r < count; ++r) {
      float* y = x + r * stride;
      std::memcpy(y, part(0, now) + r * width, row);
      for (int of = 1; of < ranks; ++of) {
        const float* other = part(of, now) + r * width;
        for (int64_t i = 0; i < width; ++i) y[i] += other[i];
      }
    }
    return true;
  }

  static bool wait(const std::atomic<uint64_t>& other, uint64_t now, double seconds) {
    const auto begin = std::chrono::steady_clock::now();
    for (int64_t tries = 0; other.load(std::memory_order_acquire) < now; ++tries) {
      if (tries < 2000) continue;
      const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
      if (waited.count() > seconds) return false;
      if (waited.count() < 2e-3) sched_yield();  // another rank may have no core of its own
      else std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return true;
  }
};

}  // namespace paceline

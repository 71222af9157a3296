// One pool of threads per process. A job is a list of steps, each cut into chunks; steps run in order, chunks in any.
// A thread takes the next chunk of a step until none is left, then waits until all are done. A thread that wakes late
// or lost its core holds nobody back: the others take its chunks. Results never depend on who took what.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace paceline {

class Job {
 public:
  virtual ~Job() = default;
  virtual void chunk(int step, int index, int thread) = 0;
};

class Pool {
 public:
  static constexpr int max_steps = 4096, max_chunks = 65535;

  static Pool& instance();
  ~Pool();
  void resize(int threads);  // including the caller's
  int size() const { return static_cast<int>(workers_.size()) + 1; }
  void run(Job& job, const std::vector<int>& chunks);  // chunks per step

 private:
  struct alignas(64) Ticket {
    std::atomic<uint64_t> next{0};  // epoch << 32 | chunks << 16 | next chunk
    std::atomic<uint64_t> done{0};  // epoch << 32 | finished chunks
  };

  Pool() : tickets_(new Ticket[max_steps]) {}
  void work(int thread);
  void walk(uint32_t epoch, int thread);
  void stop();

  std::unique_ptr<Ticket[]> tickets_;
  std::vector<std::thread> workers_;
  std::atomic<uint32_t> epoch_{0};
  std::atomic<int> steps_{0};
  std::atomic<Job*> job_{nullptr};
  std::atomic<bool> stopping_{false};
  std::atomic<int> parked_{0};
  std::mutex run_mutex_, park_mutex_;
  std::condition_variable wake_;
};

}  // namespace paceline

// One pool of threads per process. A job is a list of steps, each cut into chunks; steps run in order, chunks in any.
// Each thread has its share of a step's chunks and takes them one by one, then those that others have left, then waits
// until all are done. A thread that wakes late or lost its core holds nobody back: the others take its chunks, and
// nobody else's counter is touched before that. Results never depend on who took what.
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
  struct alignas(64) Line {  // counters of eight steps that follow each other
    std::atomic<uint64_t> word[8] = {};
  };
  using Lines = std::unique_ptr<Line[]>;

  Pool() { allot(1); }
  static std::atomic<uint64_t>& at(const Lines& lines, int step) { return lines[step / 8].word[step % 8]; }
  void allot(int threads);
  // A fork waits until no thread computes. Its child has the calling thread alone, which takes all chunks until `resize`.
  void hold();
  void release();
  void begin_again();
  void work(int thread);
  void walk(uint32_t epoch, int thread);
  void stop();

  std::vector<Lines> shares_;  // of each thread, by step: epoch << 32 | end << 16 | next chunk
  Lines done_;                 // by step: epoch << 32 | chunks << 16 | finished chunks
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

#include "measure_jobs.h"

#include <vector>

#include "program.h"

namespace paceline {

namespace {

struct Read : Job {
  const float* data;
  int64_t n;
  int parts;
  std::vector<float> sums;
  void chunk(int, int index, int) override {
    int64_t size = n / parts;
    sums[index] = kernels().read_all(data + index * size, size);
  }
};

struct Burn : Job {
  int64_t turns;
  std::vector<float> sums;
  void chunk(int, int index, int) override { sums[index] = kernels().burn(turns); }
};

}  // namespace

float read_memory(const float* data, int64_t n) {
  Read job;
  job.data = data;
  job.n = n;
  job.parts = 16 * Pool::instance().size();
  job.sums.resize(job.parts);
  Pool::instance().run(job, {job.parts});
  float total = 0;
  for (float s : job.sums) total += s;
  return total;
}

double burn_multiply_adds(int64_t turns) {
  Burn job;
  int parts = 8 * Pool::instance().size();
  job.turns = turns;
  job.sums.resize(parts);
  Pool::instance().run(job, {parts});
  return static_cast<double>(kernels().burn_flops()) * static_cast<double>(turns) * parts;
}

}  // namespace paceline

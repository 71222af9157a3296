#pragma once

#include <cstdint>

namespace paceline {

float read_memory(const float* data, int64_t n);  // reads all of it with every thread; the sum keeps it honest
double burn_multiply_adds(int64_t turns);         // returns the floating-point operations done

}  // namespace paceline

// Checks that print the values they saw. Host only.
#pragma once

#include <sstream>
#include <stdexcept>

// FASTPAR_CHECK(n >= 0, "adamw_step: expected n >= 0, got n=", n): std::invalid_argument becomes
// ValueError.
#define FASTPAR_CHECK(condition, ...)                                            \
  do {                                                                           \
    if (!(condition)) throw std::invalid_argument(fastpar::concat(__VA_ARGS__)); \
  } while (0)

namespace fastpar {

template <typename... Args>
std::string concat(const Args&... args) {
  std::ostringstream text;
  (text << ... << args);
  return text.str();
}

}  // namespace fastpar

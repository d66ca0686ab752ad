#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

namespace kdt {

// A log line that comes again and again, also in turn with others: each text is due once in 10 s.
class SeldomLine {
 public:
  explicit SeldomLine(int64_t shortest_us = 0) : shortest_us_(shortest_us) {}
  bool Due(const std::string& line, int64_t now_us);
  int TakeUntold() { return std::exchange(untold_, 0); }  // lines that were not due since the last call
  void Forget();                                          // the next is due

 private:
  const int64_t shortest_us_;  // between two lines that differ
  std::map<std::string, int64_t> told_us_;
  int64_t last_us_ = 0;  // 0: none
  int untold_ = 0;
};

}  // namespace kdt

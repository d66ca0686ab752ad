#include "coordinator/group/seldom_line.h"

namespace kdt {
namespace {

constexpr int64_t kSameTextUs = 10'000'000;

}  // namespace

bool SeldomLine::Due(const std::string& line, int64_t now_us) {
  std::erase_if(told_us_, [&](const auto& told) { return now_us - told.second >= kSameTextUs; });
  if (told_us_.contains(line) || (last_us_ != 0 && now_us - last_us_ < shortest_us_)) {
    ++untold_;
    return false;
  }
  told_us_[line] = last_us_ = now_us;
  return true;
}

void SeldomLine::Forget() {
  told_us_.clear();
  last_us_ = 0;
  untold_ = 0;
}

}  // namespace kdt

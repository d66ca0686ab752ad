// Catch2 2 (Debian 12) and 3 (Ubuntu 24.04) behind one include. Use Catch::Approx and
// Catch::Matchers::ContainsSubstring in both.
#pragma once

#ifdef KDT_CATCH2_V2
#include <catch2/catch.hpp>
namespace Catch {
using Detail::Approx;
namespace Matchers {
inline StdString::ContainsMatcher ContainsSubstring(const std::string& text) { return Contains(text); }
}  // namespace Matchers
}  // namespace Catch
#else
#include <catch2/catch_all.hpp>
#endif

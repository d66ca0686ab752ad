// Catch2 2 (Debian 12) and 3 (Ubuntu 24.04) behind one include. Use Catch::Approx in both.
#pragma once

#ifdef KDT_CATCH2_V2
#include <catch2/catch.hpp>
#else
#include <catch2/catch_all.hpp>
#endif

# Everything comes from the distribution; why each was chosen stands in docs/architecture.md.
find_package(Threads REQUIRED)
find_package(PkgConfig REQUIRED)
find_package(Protobuf REQUIRED)
find_package(absl REQUIRED)
find_package(OpenSSL REQUIRED)
find_package(gRPC CONFIG REQUIRED)
find_package(prometheus-cpp CONFIG REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(spdlog REQUIRED)
pkg_check_modules(pcre2 REQUIRED IMPORTED_TARGET libpcre2-8)
pkg_check_modules(hwy REQUIRED IMPORTED_TARGET libhwy)

if(KDT_BUILD_TESTS)
  find_package(benchmark REQUIRED)
  # Debian 12 ships Catch2 2, Ubuntu 24.04 ships Catch2 3. tests/support/catch.h hides the difference.
  find_package(Catch2 REQUIRED)
endif()

# Language, warnings, sanitizers: what every target of the project is built with.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

option(KDT_BUILD_TESTS "Build the tests and benchmarks" ON)
set(KDT_CUDA AUTO CACHE STRING "Build the CUDA backend: AUTO (when nvcc is found), ON, OFF")
set_property(CACHE KDT_CUDA PROPERTY STRINGS AUTO ON OFF)
set(KDT_NCCL AUTO CACHE STRING "Build NCCL collectives into the CUDA worker: AUTO (when nccl.h is found), ON, OFF")
set_property(CACHE KDT_NCCL PROPERTY STRINGS AUTO ON OFF)
set(KDT_SANITIZE "" CACHE STRING "Comma-separated list for -fsanitize= (address,undefined or thread)")

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

# Contraction would let the compiler fuse a*b+c where it likes, and two functions that must give the same bits would not.
add_compile_options(-Wall -Wextra -Werror -Wno-missing-field-initializers -ffp-contract=off)
if(KDT_SANITIZE)
  # GCC 12 sees uninitialized values in the library's own headers once it instruments them; a sanitizer build is not
  # where that warning is needed.
  add_compile_options(-fsanitize=${KDT_SANITIZE} -fno-omit-frame-pointer -Wno-maybe-uninitialized)
  add_link_options(-fsanitize=${KDT_SANITIZE})
endif()

find_program(KDT_CCACHE ccache)
if(KDT_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${KDT_CCACHE})
endif()
find_program(KDT_MOLD mold)
if(KDT_MOLD)
  add_link_options(-fuse-ld=mold)
endif()

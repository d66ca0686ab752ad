# The CUDA side of the build. Objects are made by nvcc for sm_90 and sm_120 through a script that reads the compiler's
# resource report and fails the build on a spill or on more shared memory than an sm_120 block has.
#
# KDT_CUDA=AUTO builds it when nvcc is found, ON demands it, OFF leaves it out. KDT_HAVE_CUDA says what came of it.
set(KDT_HAVE_CUDA FALSE)
if(NOT KDT_CUDA STREQUAL "OFF")
  find_program(KDT_NVCC nvcc HINTS ENV CUDA_PATH ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
  find_program(KDT_PYTHON python3)
  if(KDT_NVCC AND KDT_PYTHON)
    get_filename_component(KDT_CUDA_ROOT ${KDT_NVCC} REALPATH)
    get_filename_component(KDT_CUDA_ROOT ${KDT_CUDA_ROOT}/../.. ABSOLUTE)
    find_library(KDT_CUDART cudart_static PATHS ${KDT_CUDA_ROOT} PATH_SUFFIXES lib64 lib targets/x86_64-linux/lib)
    find_path(KDT_CUDA_INCLUDE cuda_runtime_api.h PATHS ${KDT_CUDA_ROOT} PATH_SUFFIXES include targets/x86_64-linux/include)
  endif()
  if(KDT_NVCC AND KDT_PYTHON AND KDT_CUDART AND KDT_CUDA_INCLUDE)
    set(KDT_HAVE_CUDA TRUE)
  elseif(KDT_CUDA STREQUAL "ON")
    message(FATAL_ERROR "KDT_CUDA=ON needs nvcc, the static CUDA runtime with its headers, and python3")
  else()
    message(STATUS "CUDA backend: left out (no complete CUDA toolkit found)")
  endif()
endif()

# kdt_cuda_objects(OUT SRC [FLAG ...]): compiles a .cu file of the current folder; OUT gets the object's path appended.
function(kdt_cuda_objects out src)
  set(object ${CMAKE_CURRENT_BINARY_DIR}/${src}.o)
  get_filename_component(folder ${object} DIRECTORY)
  file(MAKE_DIRECTORY ${folder})
  add_custom_command(
    OUTPUT ${object}
    COMMAND ${KDT_PYTHON} ${PROJECT_SOURCE_DIR}/cmake/check_cuda_resources.py --shared-limit 101376
            --report ${object}.resources.txt --
            ${KDT_NVCC} -std=c++20 -O3 -c ${CMAKE_CURRENT_SOURCE_DIR}/${src} -o ${object}
            -I${PROJECT_SOURCE_DIR} -I${PROJECT_SOURCE_DIR}/kernels/include
            -gencode arch=compute_90,code=sm_90 -gencode arch=compute_120,code=sm_120
            -Xptxas -v -Xcompiler -fPIC,-Wall,-Wextra,-Werror,-Wno-missing-field-initializers -MD -MF ${object}.d ${ARGN}
    DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${src} ${PROJECT_SOURCE_DIR}/cmake/check_cuda_resources.py
    DEPFILE ${object}.d
    COMMENT "nvcc ${src} (sm_90, sm_120)" VERBATIM)
  set(${out} ${${out}} ${object} PARENT_SCOPE)
endfunction()

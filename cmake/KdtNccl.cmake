# NCCL for the CUDA worker. Only its header is needed to build; the library is opened at run time.
#
# KDT_NCCL=AUTO uses it when the header is found, ON demands it, OFF leaves it out. KDT_HAVE_NCCL says what came of it.
set(KDT_HAVE_NCCL FALSE)
if(NOT KDT_NCCL STREQUAL "OFF")
  find_path(KDT_NCCL_INCLUDE nccl.h HINTS ENV NCCL_HOME ${KDT_CUDA_INCLUDE} PATH_SUFFIXES include)
  if(KDT_NCCL_INCLUDE)
    set(KDT_HAVE_NCCL TRUE)
  elseif(KDT_NCCL STREQUAL "ON")
    message(FATAL_ERROR "KDT_NCCL=ON needs nccl.h")
  else()
    message(STATUS "NCCL: left out (no nccl.h found)")
  endif()
endif()

#include "kernels/cuda/gemm/library.h"

#ifdef KDT_HAVE_CUBLASLT
#include <cublasLt.h>
#include <dlfcn.h>

#include <array>
#include <map>
#include <mutex>
#include <string>

namespace kdt::cuda {
namespace {

constexpr size_t kWorkspace = size_t{32} << 20;  // more gains nothing, and choices should not depend on it
constexpr size_t kMaxCached = 4096;              // shapes; beyond, the choice is made anew each time

struct Functions {
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtMatmulDescCreate) desc_create;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set;
  decltype(&cublasLtMatrixLayoutInit_internal) layout_init;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
  decltype(&cublasLtMatmul) matmul;
};

template <typename F>
bool Find(void* library, const char* name, F& to) {
  to = reinterpret_cast<F>(dlsym(library, name));
  return to != nullptr;
}

// nullptr where the library is not there.
const Functions* Library() {
  static const Functions* const found = []() -> const Functions* {
    const std::string name = "libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR);
    void* const library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return nullptr;
    static Functions f;
    const bool complete = Find(library, "cublasLtCreate", f.create) &&
                          Find(library, "cublasLtMatmulDescCreate", f.desc_create) &&
                          Find(library, "cublasLtMatmulDescSetAttribute", f.desc_set) &&
                          Find(library, "cublasLtMatrixLayoutInit_internal", f.layout_init) &&
                          Find(library, "cublasLtMatmulPreferenceCreate", f.preference_create) &&
                          Find(library, "cublasLtMatmulPreferenceSetAttribute", f.preference_set) &&
                          Find(library, "cublasLtMatmulAlgoGetHeuristic", f.heuristic) &&
                          Find(library, "cublasLtMatmul", f.matmul);
    return complete ? &f : nullptr;
  }();
  return found;
}

// rows, inputs, outputs, the three strides, float32 output, accumulate
using Key = std::array<int64_t, 8>;

// The library's state of one device. The descriptions live until the process ends.
struct Device {
  cublasLtHandle_t handle = nullptr;
  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatmulPreference_t preference = nullptr;
  std::map<Key, cublasLtMatmulHeuristicResult_t> chosen;
};

std::mutex mutex;

// nullptr when the library does not start on this device.
Device* Current(const Functions& f) {
  static std::map<int, Device> devices;
  int number = 0;
  if (cudaGetDevice(&number) != cudaSuccess) return nullptr;
  const auto [at, fresh] = devices.try_emplace(number);
  Device& device = at->second;
  if (fresh) {
    const cublasOperation_t transposed = CUBLAS_OP_T;
    const size_t workspace = kWorkspace;
    const uint32_t alignment = 16;  // tensors may be columns of others
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t what, const auto& value) {
      return f.preference_set(device.preference, what, &value, sizeof(value)) == CUBLAS_STATUS_SUCCESS;
    };
    const bool started =
        f.create(&device.handle) == CUBLAS_STATUS_SUCCESS &&
        f.desc_create(&device.product, CUBLAS_COMPUTE_32F, CUDA_R_32F) == CUBLAS_STATUS_SUCCESS &&
        f.desc_set(device.product, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof(transposed)) ==
            CUBLAS_STATUS_SUCCESS &&
        f.preference_create(&device.preference) == CUBLAS_STATUS_SUCCESS &&
        prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace) &&
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment) &&
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment) &&
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment) &&
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment);
    if (!started) device.handle = nullptr;
  }
  return device.handle == nullptr ? nullptr : &device;
}

}  // namespace

bool HaveLibrary() { return Library() != nullptr; }

cudaError_t LibraryGemm(const Launch& launch, const kernels::GemmArgs& args) {
  const Functions* const f = Library();
  if (f == nullptr || launch.workspace_bytes < kWorkspace) return cudaErrorNotSupported;
  const bool f32 = args.y.dtype == kernels::DType::kF32;
  const int64_t rows = args.x.rows, outs = args.w.rows, inputs = args.w.cols;
  const std::lock_guard<std::mutex> lock(mutex);
  Device* const device = Current(*f);
  if (device == nullptr) return cudaErrorNotSupported;
  // The library's matrices lie in columns: y^T = (W^T)^T x^T.
  cublasLtMatrixLayoutOpaque_t w, x, y;
  const auto layout = [&](cublasLtMatrixLayoutOpaque_t* to, cudaDataType type, int64_t height, int64_t width,
                          int64_t stride) {
    return f->layout_init(to, sizeof(*to), type, static_cast<uint64_t>(height), static_cast<uint64_t>(width),
                          stride) == CUBLAS_STATUS_SUCCESS;
  };
  if (!layout(&w, CUDA_R_16BF, inputs, outs, args.w.stride) ||
      !layout(&x, CUDA_R_16BF, inputs, rows, args.x.stride) ||
      !layout(&y, f32 ? CUDA_R_32F : CUDA_R_16BF, outs, rows, args.y.stride)) {
    return cudaErrorNotSupported;
  }
  const Key key{rows, inputs, outs, args.x.stride, args.w.stride, args.y.stride, f32, args.accumulate};
  cublasLtMatmulHeuristicResult_t choice;
  if (const auto known = device->chosen.find(key); known != device->chosen.end()) {
    choice = known->second;
  } else {
    int found = 0;
    if (f->heuristic(device->handle, device->product, &w, &x, &y, &y, device->preference, 1, &choice,
                     &found) != CUBLAS_STATUS_SUCCESS ||
        found == 0) {
      return cudaErrorNotSupported;
    }
    if (device->chosen.size() < kMaxCached) device->chosen.emplace(key, choice);
  }
  const float alpha = 1.0f, beta = args.accumulate ? 1.0f : 0.0f;
  const cublasStatus_t status =
      f->matmul(device->handle, device->product, &alpha, args.w.data, &w, args.x.data, &x, &beta, args.y.data,
                &y, args.y.data, &y, &choice.algo, launch.workspace, kWorkspace, launch.stream);
  return status == CUBLAS_STATUS_SUCCESS ? cudaSuccess : cudaErrorNotSupported;
}

}  // namespace kdt::cuda

#else

namespace kdt::cuda {

bool HaveLibrary() { return false; }
cudaError_t LibraryGemm(const Launch&, const kernels::GemmArgs&) { return cudaErrorNotSupported; }

}  // namespace kdt::cuda

#endif

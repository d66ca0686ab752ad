#include "worker/model/random_source.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/bf16.h"
#include "common/int4.h"
#include "common/rng.h"
#include "common/status.h"
#include "kdt/kernels/moe.h"

namespace kdt {
namespace {

constexpr size_t kBlockBytes = 16 << 20;  // small enough for a processor's cache
constexpr size_t kMaxTensorBytes = size_t{8} << 30;
constexpr size_t kRangeBytes = kMaxTensorBytes + kBlockBytes;
constexpr size_t kStartStep = 256;  // tensors start at multiples of this within the block
// Of the values of BalancedInt4, and of u uniform in -1 .. 1.
constexpr double kInt4Deviation = 4.18;
constexpr double kUniformDeviation = 0.57735;

// Fills a block.
using Fill = std::function<void(std::span<uint32_t> words, uint64_t seed)>;

// splitmix64: fast and good enough to fill memory.
class Words {
 public:
  explicit Words(uint64_t seed) : state_(seed) {}
  uint32_t Next() {
    state_ += 0x9e3779b97f4a7c15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return static_cast<uint32_t>(z >> 32);
  }
  float Uniform() { return static_cast<float>(Next()) * 0x1p-31f - 1.0f; }  // -1 .. 1

 private:
  uint64_t state_;
};

// Eight INT4 values of mean 0: -8 becomes 0. With a mean, every product would add a multiple of the same
// vector to the residual stream, layer after layer, and the rows would choose the same experts.
uint32_t BalancedInt4(uint32_t word) {
  const uint32_t some = (word | word >> 1 | word >> 2 | word >> 3) & 0x11111111u;
  return word | (~some & 0x11111111u) << 3;
}

void FillBf16(std::span<uint32_t> words, uint64_t seed, const std::function<float(Words&)>& value) {
  Words random(seed);
  for (uint32_t& word : words) {
    const uint32_t low = FloatToBf16(value(random));
    word = low | static_cast<uint32_t>(FloatToBf16(value(random))) << 16;
  }
}

// One random block, mapped behind itself until it fills a range of addresses.
class Range {
 public:
  static absl::StatusOr<std::unique_ptr<Range>> Make(const Fill& fill, uint64_t seed) {
    auto range = std::make_unique<Range>();
    const auto failed = [](const char* call) {
      return absl::ResourceExhaustedError(absl::StrCat("random weights: ", call, ": ", strerror(errno)));
    };
    const int file = memfd_create("random-weights", MFD_CLOEXEC);
    if (file < 0) return failed("memfd_create");
    const absl::Status status = [&] {
      if (ftruncate(file, kBlockBytes) != 0) return failed("ftruncate");
      void* all = mmap(nullptr, kRangeBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (all == MAP_FAILED) return failed("mmap");
      range->base_ = static_cast<std::byte*>(all);
      for (size_t at = 0; at < kRangeBytes; at += kBlockBytes) {
        if (mmap(range->base_ + at, kBlockBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) ==
            MAP_FAILED) {
          return failed("mmap");
        }
      }
      return absl::OkStatus();
    }();
    close(file);
    KDT_RETURN_IF_ERROR(status);
    fill({reinterpret_cast<uint32_t*>(range->base_), kBlockBytes / sizeof(uint32_t)}, seed);
    return range;
  }
  Range() = default;
  ~Range() {
    if (base_ != nullptr) munmap(base_, kRangeBytes);
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

  const std::byte* base() const { return base_; }

 private:
  std::byte* base_ = nullptr;
};

class RandomSource final : public WeightSource {
 public:
  std::string name() const override { return "random weights"; }
  std::string Digest() const override { return "0000000000000000"; }
  bool Contains(absl::string_view) const override { return false; }
  absl::Status CheckTensorCount(size_t, absl::string_view) const override { return absl::OkStatus(); }

  absl::StatusOr<TensorView> Find(absl::string_view name, std::initializer_list<DType> dtypes,
                                  std::initializer_list<int64_t> shape) const override {
    std::string kind;
    Fill fill;
    if (shape.size() == 1) {
      const float value = absl::StrContains(name, "bias") ? 0.0f : 1.0f;
      kind = absl::StrCat("constant ", value);
      fill = [value](std::span<uint32_t> words, uint64_t seed) {
        FillBf16(words, seed, [value](Words&) { return value; });
      };
    } else {
      const double in = static_cast<double>(*(shape.end() - 1));
      const double deviation = absl::StrContains(name, "embed_tokens") ? 1.0 : 1.0 / std::sqrt(in);
      const auto span = static_cast<float>(deviation / kUniformDeviation);
      kind = absl::StrCat("matrix ", span);
      fill = [span](std::span<uint32_t> words, uint64_t seed) {
        FillBf16(words, seed, [span](Words& random) { return random.Uniform() * span; });
      };
    }
    return View(name, *dtypes.begin(), shape, kind, fill);
  }

  absl::StatusOr<Int4View> FindInt4(absl::string_view name, int64_t out, int64_t in) const override {
    Int4View view;
    const Fill values = [](std::span<uint32_t> words, uint64_t seed) {
      Words random(seed);
      for (uint32_t& word : words) word = BalancedInt4(random.Next());
    };
    KDT_ASSIGN_OR_RETURN(view.packed, View(name, DType::kI32, {out, in / kInt4PerWord}, "int4", values));
    const auto scale = static_cast<float>(1.0 / (kInt4Deviation * std::sqrt(static_cast<double>(in))));
    const Fill scales = [scale](std::span<uint32_t> words, uint64_t seed) {
      FillBf16(words, seed, [scale](Words& random) { return scale * (1.0f + 0.5f * random.Uniform()); });
    };
    KDT_ASSIGN_OR_RETURN(view.scale, View(name, DType::kBF16, {out, in / kernels::kInt4Group},
                                          absl::StrCat("scale ", scale), scales));
    return view;
  }

  void Release(const TensorView&, std::span<const std::byte>) const override {}

 private:
  absl::StatusOr<TensorView> View(absl::string_view name, DType dtype, std::initializer_list<int64_t> shape,
                                  const std::string& kind, const Fill& fill) const {
    size_t bytes = DTypeSize(dtype);
    for (const int64_t extent : shape) bytes *= static_cast<size_t>(extent);
    if (bytes > kMaxTensorBytes) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, ": ", bytes, " bytes are too many for random weights"));
    }
    std::unique_ptr<Range>& range = ranges_[kind];
    if (range == nullptr) {
      // Blocks of their own, so that an embedding is no row of a matrix.
      KDT_ASSIGN_OR_RETURN(range, Range::Make(fill, ranges_.size()));
    }
    const size_t start =
        std::hash<std::string>()(std::string(name)) % (kBlockBytes / kStartStep) * kStartStep;
    return TensorView{std::string(name), dtype, shape, {range->base() + start, bytes}};
  }

  mutable std::map<std::string, std::unique_ptr<Range>> ranges_;
};

}  // namespace

std::unique_ptr<WeightSource> MakeRandomSource() { return std::make_unique<RandomSource>(); }

absl::Status FillRandom(kernels::Backend& backend, kernels::DType dtype, const kernels::Buffer& buffer) {
  constexpr uint64_t kSeed = 1 << 20;  // of no block of weights
  Words random(kSeed);
  const auto value = [](Words& words) { return words.Uniform() / static_cast<float>(kUniformDeviation); };
  KDT_ASSIGN_OR_RETURN(void* host, backend.AllocateHost(kBlockBytes));
  const absl::Status status = [&]() -> absl::Status {
    if (dtype == kernels::DType::kBF16) {
      FillBf16({static_cast<uint32_t*>(host), kBlockBytes / sizeof(uint32_t)}, kSeed, value);
    } else {
      for (size_t i = 0; i < kBlockBytes / sizeof(float); ++i) static_cast<float*>(host)[i] = value(random);
    }
    for (size_t at = 0; at < buffer.bytes(); at += kBlockBytes) {
      KDT_RETURN_IF_ERROR(
          backend.UploadAsync(buffer.as<char>() + at, host, std::min(kBlockBytes, buffer.bytes() - at)));
    }
    return backend.Synchronize();
  }();
  backend.FreeHost(host);
  return status;
}

}  // namespace kdt

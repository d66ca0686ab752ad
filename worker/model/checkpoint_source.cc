#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/int4.h"
#include "common/status.h"
#include "kdt/kernels/moe.h"
#include "worker/model/weight_source.h"

namespace kdt {
namespace {

class CheckpointSource final : public WeightSource {
 public:
  explicit CheckpointSource(Checkpoint checkpoint) : checkpoint_(std::move(checkpoint)) {}

  std::string name() const override { return checkpoint_.folder(); }
  std::string Digest() const override { return checkpoint_.Digest(); }
  bool Contains(absl::string_view name) const override { return checkpoint_.Contains(name); }

  absl::Status CheckTensorCount(size_t expected, absl::string_view what) const override {
    if (checkpoint_.tensor_count() == expected) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(checkpoint_.folder(), ": the checkpoint holds ",
                                                   checkpoint_.tensor_count(), " tensors where ", expected,
                                                   " are known; ", what));
  }

  absl::StatusOr<TensorView> Find(absl::string_view name, std::initializer_list<DType> dtypes,
                                  std::initializer_list<int64_t> shape) const override {
    KDT_ASSIGN_OR_RETURN(TensorView tensor, checkpoint_.Find(name));
    const bool allowed = std::find(dtypes.begin(), dtypes.end(), tensor.dtype) != dtypes.end();
    KDT_RETURN_IF_ERROR(Expect(tensor, allowed ? tensor.dtype : *dtypes.begin(),
                               std::span<const int64_t>(shape.begin(), shape.size())));
    return tensor;
  }

  absl::StatusOr<Int4View> FindInt4(absl::string_view name, int64_t out, int64_t in) const override {
    KDT_ASSIGN_OR_RETURN(const TensorView shape,
                         checkpoint_.Find(absl::StrCat(name, ".weight_shape"), DType::kI32, {2}));
    const auto extents = shape.As<int32_t>();
    if (extents[0] != out || extents[1] != in) {
      return absl::InvalidArgumentError(absl::StrCat(shape.name, " is [", extents[0], ", ", extents[1],
                                                     "], but the config asks for [", out, ", ", in, "]"));
    }
    Int4View view;
    KDT_ASSIGN_OR_RETURN(view.packed, checkpoint_.Find(absl::StrCat(name, ".weight_packed"), DType::kI32,
                                                       {out, in / kInt4PerWord}));
    KDT_ASSIGN_OR_RETURN(view.scale, checkpoint_.Find(absl::StrCat(name, ".weight_scale"), DType::kBF16,
                                                      {out, in / kernels::kInt4Group}));
    return view;
  }

  void Release(const TensorView& tensor, std::span<const std::byte> bytes) const override {
    checkpoint_.DropPages(tensor, bytes);
  }

 private:
  Checkpoint checkpoint_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<WeightSource>> OpenCheckpointSource(const std::string& folder) {
  KDT_ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::Open(folder));
  return std::make_unique<CheckpointSource>(std::move(checkpoint));
}

}  // namespace kdt

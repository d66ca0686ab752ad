#include "common/safetensors_header.h"

#include <array>
#include <optional>
#include <set>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace kdt {
namespace {

constexpr size_t kMaxRank = 16;

struct DTypeInfo {
  DType dtype;
  absl::string_view name;
  size_t size;
};
constexpr std::array<DTypeInfo, 15> kDTypes = {{{DType::kBool, "BOOL", 1},
                                                {DType::kU8, "U8", 1},
                                                {DType::kI8, "I8", 1},
                                                {DType::kF8E4M3, "F8_E4M3", 1},
                                                {DType::kF8E5M2, "F8_E5M2", 1},
                                                {DType::kU16, "U16", 2},
                                                {DType::kI16, "I16", 2},
                                                {DType::kF16, "F16", 2},
                                                {DType::kBF16, "BF16", 2},
                                                {DType::kU32, "U32", 4},
                                                {DType::kI32, "I32", 4},
                                                {DType::kF32, "F32", 4},
                                                {DType::kU64, "U64", 8},
                                                {DType::kI64, "I64", 8},
                                                {DType::kF64, "F64", 8}}};

// What the parser is inside of. The grammar is fixed: {NAME: {"dtype": S, "shape": [N...], "data_offsets":
// [N, N]}, ...}.
enum class Where { kTop, kRoot, kMetadata, kTensor, kShape, kOffsets };

class HeaderHandler : public nlohmann::json_sax<nlohmann::json> {
 public:
  std::string error;
  std::map<std::string, HeaderEntry> entries;

  bool null() override { return Fail("null is not allowed"); }
  bool boolean(bool) override { return Fail("true and false are not allowed"); }
  bool number_float(number_float_t, const string_t&) override { return Fail("numbers must be integers"); }
  bool binary(binary_t&) override { return Fail("binary values are not allowed"); }
  bool number_integer(number_integer_t) override { return Fail("negative numbers are not allowed"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (where_ == Where::kShape) {
      if (entry_.shape.size() == kMaxRank)
        return Fail(absl::StrCat("shape has more than ", kMaxRank, " dimensions"));
      if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
        return Fail("shape does not fit in 63 bits");
      entry_.shape.push_back(static_cast<int64_t>(value));
      return true;
    }
    if (where_ == Where::kOffsets) {
      if (offsets_ == 2) return Fail("data_offsets must have two numbers");
      (offsets_++ == 0 ? entry_.begin : entry_.end) = value;
      return true;
    }
    return Fail("a number where none belongs");
  }

  bool string(string_t& value) override {
    if (where_ == Where::kMetadata) return true;
    if (where_ != Where::kTensor || key_ != "dtype") return Fail("a string where none belongs");
    for (const DTypeInfo& info : kDTypes) {
      if (info.name != value) continue;
      entry_.dtype = info.dtype;
      return true;
    }
    return Fail(absl::StrCat("dtype \"", value, "\" is not known"));
  }

  bool start_object(size_t) override {
    if (where_ == Where::kTop) {
      where_ = Where::kRoot;
    } else if (where_ == Where::kRoot) {
      where_ = name_ == "__metadata__" ? Where::kMetadata : Where::kTensor;
      entry_ = {};
      offsets_ = 0;
    } else {
      return Fail("an object where none belongs");
    }
    keys_.clear();
    return true;
  }

  bool key(string_t& value) override {
    if (where_ == Where::kRoot) {
      name_ = value;
      if (!names_.insert(value).second) return Fail("occurs twice");
      return true;
    }
    key_ = value;
    if (!keys_.insert(value).second) return Fail(absl::StrCat("field \"", value, "\" occurs twice"));
    if (where_ == Where::kTensor && value != "dtype" && value != "shape" && value != "data_offsets") {
      return Fail(absl::StrCat("field \"", value, "\" is not known"));
    }
    return true;
  }

  bool end_object() override {
    if (where_ == Where::kTensor) {
      if (keys_.size() != 3) return Fail("must have dtype, shape and data_offsets");
      if (offsets_ != 2) return Fail("data_offsets must have two numbers");
      entries.emplace(name_, std::move(entry_));
    }
    where_ = where_ == Where::kRoot ? Where::kTop : Where::kRoot;
    return true;
  }

  bool start_array(size_t) override {
    if (where_ == Where::kTensor && key_ == "shape") {
      where_ = Where::kShape;
    } else if (where_ == Where::kTensor && key_ == "data_offsets") {
      where_ = Where::kOffsets;
    } else {
      return Fail("a list where none belongs");
    }
    return true;
  }

  bool end_array() override {
    where_ = Where::kTensor;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception&) override {
    error = absl::StrCat("header is not valid JSON at byte ", position);
    return false;
  }

 private:
  bool Fail(absl::string_view message) {
    error =
        name_.empty() ? absl::StrCat("header: ", message) : absl::StrCat("tensor \"", name_, "\": ", message);
    return false;
  }

  Where where_ = Where::kTop;
  std::string name_, key_;
  std::set<std::string> names_, keys_;
  HeaderEntry entry_;
  int offsets_ = 0;
};

}  // namespace

size_t DTypeSize(DType dtype) { return kDTypes[static_cast<size_t>(dtype)].size; }
absl::string_view DTypeName(DType dtype) { return kDTypes[static_cast<size_t>(dtype)].name; }

absl::StatusOr<std::map<std::string, HeaderEntry>> ParseSafetensorsHeader(absl::string_view text) {
  HeaderHandler handler;
  if (!nlohmann::json::sax_parse(text, &handler)) {
    return absl::InvalidArgumentError(handler.error.empty() ? "header is not valid JSON" : handler.error);
  }
  return std::move(handler.entries);
}

}  // namespace kdt

#include "common/json_config.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>

#include "absl/strings/str_cat.h"
#include "common/json_fault.h"
#include "common/status.h"
#include "nlohmann/json.hpp"

namespace kdt {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxBytes = size_t{64} << 20;
// A DOM of a deeply nested file takes many times its size in memory; real configs nest a handful of levels.
constexpr int kMaxDepth = 64;

bool TooDeep(absl::string_view text) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      if (++depth > kMaxDepth) return true;
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
  return false;
}

// Shortest text that reads as the same number: limits in errors should look as they were written.
std::string NumberText(double value) { return absl::StrCat(value); }

}  // namespace

struct JsonConfig::Impl {
  struct Shared {
    std::string name;
    Json root;
    absl::Status fault;
  };
  std::shared_ptr<Shared> shared;
  const Json* node = nullptr;
  std::string path;  // "text_config." or ""

  const Json* Get(absl::string_view key) const {
    const auto it = node->find(std::string(key));
    return it == node->end() || it->is_null() ? nullptr : &*it;
  }
};

JsonConfig::JsonConfig(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
JsonConfig::JsonConfig(const JsonConfig& other) : impl_(std::make_unique<Impl>(*other.impl_)) {}
JsonConfig& JsonConfig::operator=(const JsonConfig& other) {
  impl_ = std::make_unique<Impl>(*other.impl_);
  return *this;
}
JsonConfig::JsonConfig(JsonConfig&&) noexcept = default;
JsonConfig& JsonConfig::operator=(JsonConfig&&) noexcept = default;
JsonConfig::~JsonConfig() = default;

absl::StatusOr<JsonConfig> JsonConfig::Load(const std::string& path) {
  std::error_code ec;
  const uintmax_t size = std::filesystem::file_size(path, ec);
  if (ec) return absl::NotFoundError(absl::StrCat(path, ": cannot be opened: ", ec.message()));
  if (size > kMaxBytes) return absl::InvalidArgumentError(absl::StrCat(path, ": larger than 64 MB"));
  std::string text(size, '\0');
  std::ifstream file(path, std::ios::binary);
  if (!file.read(text.data(), static_cast<std::streamsize>(size))) {
    return absl::DataLossError(absl::StrCat(path, ": cannot be read"));
  }
  return Parse(text, path);
}

absl::StatusOr<JsonConfig> JsonConfig::Parse(absl::string_view text, const std::string& name) {
  if (text.size() > kMaxBytes) return absl::InvalidArgumentError(absl::StrCat(name, ": larger than 64 MB"));
  if (TooDeep(text)) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": nested deeper than ", kMaxDepth, " levels"));
  }
  auto impl = std::make_unique<Impl>();
  impl->shared = std::make_shared<Impl::Shared>();
  impl->shared->name = name;
  std::vector<std::set<std::string>> open_objects;
  std::string duplicate;
  const auto watch = [&](int, Json::parse_event_t event, Json& value) {
    if (event == Json::parse_event_t::object_start) open_objects.emplace_back();
    if (event == Json::parse_event_t::object_end) open_objects.pop_back();
    if (event == Json::parse_event_t::key && !open_objects.back().insert(value.get<std::string>()).second) {
      duplicate = value.get<std::string>();
    }
    return true;
  };
  KDT_ASSIGN_OR_RETURN(impl->shared->root, ParseJson(text, name, watch));
  if (!duplicate.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": field \"", duplicate, "\" occurs twice"));
  }
  if (!impl->shared->root.is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": the top level is not a JSON object"));
  }
  impl->node = &impl->shared->root;
  return JsonConfig(std::move(impl));
}

bool JsonConfig::Has(absl::string_view key) const { return impl_->Get(key) != nullptr; }

bool JsonConfig::IsObject(absl::string_view key) const {
  const Json* value = impl_->Get(key);
  return value != nullptr && value->is_object();
}

std::vector<std::string> JsonConfig::Keys() const {
  std::vector<std::string> keys;
  for (const auto& item : impl_->node->items()) keys.push_back(item.key());
  return keys;
}

void JsonConfig::Fail(absl::string_view key, absl::string_view message) {
  if (!impl_->shared->fault.ok()) return;
  impl_->shared->fault =
      absl::InvalidArgumentError(absl::StrCat(impl_->shared->name, ": ", impl_->path, key, " ", message));
}

void JsonConfig::RefuseIfSet(absl::string_view key, absl::string_view why) {
  const Json* value = impl_->Get(key);
  if (value == nullptr || (value->is_boolean() && !value->get<bool>())) return;
  Fail(key, why);
}

absl::Status JsonConfig::status() const { return impl_->shared->fault; }

namespace {

// The value as int64 if it is an integer within [min, max]; otherwise the message that follows the field's
// name.
absl::StatusOr<int64_t> ReadInt(const Json& value, int64_t min, int64_t max) {
  const bool fits = value.is_number_unsigned() ? value.get<uint64_t>() <= std::numeric_limits<int64_t>::max()
                                               : value.is_number_integer();
  if (!fits) return absl::InvalidArgumentError(absl::StrCat("must be an integer, is ", value.dump()));
  const int64_t number = value.get<int64_t>();
  if (number >= min && number <= max) return number;
  if (min == max) return absl::InvalidArgumentError(absl::StrCat("must be ", min, ", is ", number));
  return absl::InvalidArgumentError(absl::StrCat("must lie in ", min, " .. ", max, ", is ", number));
}

}  // namespace

int64_t JsonConfig::Int(absl::string_view key, int64_t min, int64_t max) {
  const Json* value = impl_->Get(key);
  if (value == nullptr) {
    Fail(key, "is missing");
    return min;
  }
  const absl::StatusOr<int64_t> number = ReadInt(*value, min, max);
  if (number.ok()) return *number;
  Fail(key, number.status().message());
  return min;
}

double JsonConfig::Number(absl::string_view key, double min, double max) {
  const Json* value = impl_->Get(key);
  if (value == nullptr) {
    Fail(key, "is missing");
    return min;
  }
  if (!value->is_number()) {
    Fail(key, absl::StrCat("must be a number, is ", value->dump()));
    return min;
  }
  const double number = value->get<double>();
  if (std::isfinite(number) && number >= min && number <= max) return number;
  Fail(key, absl::StrCat("must lie in ", NumberText(min), " .. ", NumberText(max), ", is ", value->dump()));
  return min;
}

bool JsonConfig::Bool(absl::string_view key) {
  const Json* value = impl_->Get(key);
  if (value != nullptr && value->is_boolean()) return value->get<bool>();
  Fail(key, value == nullptr ? "is missing" : "must be true or false");
  return false;
}

std::string JsonConfig::String(absl::string_view key) {
  const Json* value = impl_->Get(key);
  if (value != nullptr && value->is_string()) return value->get<std::string>();
  Fail(key, value == nullptr ? "is missing" : "must be a string");
  return "";
}

std::vector<int64_t> JsonConfig::IntOrList(absl::string_view key, int64_t min, int64_t max) {
  const Json* value = impl_->Get(key);
  if (value == nullptr) {
    Fail(key, "is missing");
    return {};
  }
  if (!value->is_array()) return {Int(key, min, max)};
  std::vector<int64_t> numbers;
  for (const Json& element : *value) {
    const absl::StatusOr<int64_t> number = ReadInt(element, min, max);
    if (!number.ok()) {
      Fail(absl::StrCat(key, "[", numbers.size(), "]"), number.status().message());
      return {};
    }
    numbers.push_back(*number);
  }
  return numbers;
}

std::vector<std::string> JsonConfig::StringList(absl::string_view key) {
  const Json* value = impl_->Get(key);
  std::vector<std::string> strings;
  if (value == nullptr || !value->is_array()) {
    Fail(key, value == nullptr ? "is missing" : "must be a list");
    return {};
  }
  for (const Json& element : *value) {
    if (!element.is_string()) {
      Fail(absl::StrCat(key, "[", strings.size(), "]"), "must be a string");
      return {};
    }
    strings.push_back(element.get<std::string>());
  }
  return strings;
}

JsonConfig JsonConfig::Object(absl::string_view key) {
  static const Json kEmpty = Json::object();
  auto impl = std::make_unique<Impl>(*impl_);
  const Json* value = impl_->Get(key);
  if (value == nullptr || !value->is_object()) {
    Fail(key, value == nullptr ? "is missing" : "must be an object");
    value = &kEmpty;
  }
  impl->node = value;
  impl->path = absl::StrCat(impl_->path, key, ".");
  return JsonConfig(std::move(impl));
}

int64_t JsonConfig::IntOr(absl::string_view key, int64_t otherwise, int64_t min, int64_t max) {
  return Has(key) ? Int(key, min, max) : otherwise;
}
double JsonConfig::NumberOr(absl::string_view key, double otherwise, double min, double max) {
  return Has(key) ? Number(key, min, max) : otherwise;
}
bool JsonConfig::BoolOr(absl::string_view key, bool otherwise) { return Has(key) ? Bool(key) : otherwise; }
std::string JsonConfig::StringOr(absl::string_view key, absl::string_view otherwise) {
  return Has(key) ? String(key) : std::string(otherwise);
}

}  // namespace kdt

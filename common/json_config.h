// Strict reading of JSON configuration files. Every accessor checks type and range; the first fault is kept
// and names file and field ("config.json: text_config.n_group must be 1, is 8"), so that a parser reads field
// after field and asks status() once at the end. nlohmann::json stays out of this header.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kdt {

class JsonConfig {
 public:
  // Reads a file (at most 64 MB, valid JSON, an object at the top, no duplicate keys).
  static absl::StatusOr<JsonConfig> Load(const std::string& path);
  // The same from text; `name` stands for the file in errors.
  static absl::StatusOr<JsonConfig> Parse(absl::string_view text, const std::string& name);

  JsonConfig(const JsonConfig&);
  JsonConfig& operator=(const JsonConfig&);
  JsonConfig(JsonConfig&&) noexcept;
  JsonConfig& operator=(JsonConfig&&) noexcept;
  ~JsonConfig();

  // Present and not null.
  bool Has(absl::string_view key) const;
  bool IsObject(absl::string_view key) const;
  std::vector<std::string> Keys() const;

  // Required fields. After a fault they return a harmless value within [min, max].
  int64_t Int(absl::string_view key, int64_t min, int64_t max);
  double Number(absl::string_view key, double min, double max);
  bool Bool(absl::string_view key);
  std::string String(absl::string_view key);
  // An integer or a list of integers, as eos_token_id.
  std::vector<int64_t> IntOrList(absl::string_view key, int64_t min, int64_t max);
  std::vector<std::string> StringList(absl::string_view key);
  // A nested object; shares the fault with this one. An empty object after a fault.
  JsonConfig Object(absl::string_view key);

  // Optional fields: the default when absent or null; still checked when present.
  int64_t IntOr(absl::string_view key, int64_t otherwise, int64_t min, int64_t max);
  double NumberOr(absl::string_view key, double otherwise, double min, double max);
  bool BoolOr(absl::string_view key, bool otherwise);
  std::string StringOr(absl::string_view key, absl::string_view otherwise);

  // Records "FILE: PATH.key MESSAGE" as the fault if there is none yet.
  void Fail(absl::string_view key, absl::string_view message);
  // Refuses a field that is present (and neither null nor false).
  void RefuseIfSet(absl::string_view key, absl::string_view why);
  absl::Status status() const;

 private:
  struct Impl;
  explicit JsonConfig(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kdt

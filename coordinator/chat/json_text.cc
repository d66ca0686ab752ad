#include "coordinator/chat/json_text.h"

#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/json_fault.h"
#include "nlohmann/json.hpp"

namespace kdt {
namespace {

using Json = nlohmann::ordered_json;

// Writing a value out recurses once a level, so depth must not be the client's choice.
constexpr int kMaxDepth = 64;

}  // namespace

absl::StatusOr<std::string> CompactJsonObject(const std::string& text) {
  bool too_deep = false;
  std::string duplicate;
  bool has_duplicate = false;
  std::vector<std::set<std::string>> open;  // keys of the objects that are being read
  const auto watch = [&](int depth, Json::parse_event_t event, Json& value) {
    if (depth >= kMaxDepth) {
      too_deep = true;
      return false;  // drops the value, so that the tree stays shallow
    }
    if (event == Json::parse_event_t::object_start) open.emplace_back();
    if (event == Json::parse_event_t::object_end) open.pop_back();
    if (event == Json::parse_event_t::key && !has_duplicate) {
      auto key = value.get<std::string>();
      has_duplicate = !open.back().insert(key).second;
      if (has_duplicate) duplicate = std::move(key);
    }
    return true;
  };
  const Json json = Json::parse(text, watch, /*allow_exceptions=*/false);
  if (json.is_discarded())
    return absl::InvalidArgumentError(absl::StrCat("is not valid JSON: ", JsonFault(text)));
  if (too_deep) return absl::InvalidArgumentError(absl::StrCat("has more than ", kMaxDepth, " levels"));
  if (has_duplicate) return absl::InvalidArgumentError(absl::StrCat("has the key \"", duplicate, "\" twice"));
  if (!json.is_object()) return absl::InvalidArgumentError("must be a JSON object");
  return json.dump();
}

bool IsJsonObject(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t\r\n");
  return first != std::string::npos && text[first] == '{' && Json::accept(text);
}

}  // namespace kdt

// Checkpoint of common/safetensors.h: the shards of a folder as one.
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/json_config.h"
#include "common/safetensors.h"
#include "common/status.h"

namespace kdt {
namespace {

constexpr char kSingleFile[] = "model.safetensors";
constexpr char kIndexFile[] = "model.safetensors.index.json";

// FNV-1a, 64 bits: tells different checkpoints apart; not meant against an adversary.
class Hasher {
 public:
  void Add(absl::string_view text) {
    for (const char c : text) Step(static_cast<uint8_t>(c));
    Step(0xff);  // ends a field: "ab","c" and "a","bc" differ
  }
  uint64_t value() const { return hash_; }

 private:
  void Step(uint8_t byte) { hash_ = (hash_ ^ byte) * 0x100000001b3ull; }
  uint64_t hash_ = 0xcbf29ce484222325ull;
};

// Shard names come from the index: plain names within the folder only.
bool IsPlainName(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos &&
         name.find('\0') == std::string::npos;
}

}  // namespace

absl::StatusOr<Checkpoint> Checkpoint::Open(const std::string& folder) {
  std::error_code ec;
  if (!std::filesystem::is_directory(folder, ec)) {
    return absl::NotFoundError(absl::StrCat(folder, ": not a checkpoint folder"));
  }
  Checkpoint checkpoint;
  checkpoint.folder_ = folder;
  const std::filesystem::path base(folder);
  const std::string index_path = (base / kIndexFile).string();
  std::map<std::string, std::string> listed;  // tensor -> shard
  std::set<std::string> shards;
  const bool has_index = std::filesystem::exists(index_path, ec);
  if (has_index) {
    KDT_ASSIGN_OR_RETURN(JsonConfig index, JsonConfig::Load(index_path));
    JsonConfig map = index.Object("weight_map");
    for (const std::string& tensor : map.Keys()) {
      const std::string shard = map.String(tensor);
      if (map.status().ok() && !IsPlainName(shard)) map.Fail(tensor, "must name a file of the same folder");
      listed[tensor] = shard;
      shards.insert(shard);
    }
    KDT_RETURN_IF_ERROR(index.status());
    if (listed.empty()) return absl::InvalidArgumentError(absl::StrCat(index_path, ": weight_map is empty"));
  } else {
    shards.insert(kSingleFile);
  }
  for (const std::string& shard : shards) {
    KDT_ASSIGN_OR_RETURN(std::unique_ptr<SafetensorsFile> file,
                         SafetensorsFile::Open((base / shard).string()));
    for (const auto& [name, tensor] : file->tensors()) {
      const auto it = listed.find(name);
      if (has_index && (it == listed.end() || it->second != shard)) {
        return absl::InvalidArgumentError(absl::StrCat(file->path(), ": tensor \"", name,
                                                       "\" is not listed for this file in ", kIndexFile));
      }
      checkpoint.where_.emplace(name, checkpoint.files_.size());
      checkpoint.total_bytes_ += tensor.bytes.size();
    }
    checkpoint.files_.push_back(std::move(file));
  }
  for (const auto& [name, shard] : listed) {
    if (checkpoint.where_.find(name) == checkpoint.where_.end()) {
      return absl::InvalidArgumentError(absl::StrCat((base / shard).string(), ": tensor \"", name,
                                                     "\" is missing, ", kIndexFile,
                                                     " lists it for this file"));
    }
  }
  std::ifstream config(base / "config.json", std::ios::binary);
  std::ostringstream text;
  if (config) text << config.rdbuf();
  checkpoint.config_text_ = text.str();
  return checkpoint;
}

bool Checkpoint::Contains(absl::string_view name) const { return where_.find(name) != where_.end(); }

absl::StatusOr<TensorView> Checkpoint::Find(absl::string_view name) const {
  const auto it = where_.find(name);
  if (it == where_.end())
    return absl::NotFoundError(absl::StrCat(folder_, ": tensor \"", name, "\" is missing"));
  return files_[it->second]->Find(name);
}

absl::StatusOr<TensorView> Checkpoint::Find(absl::string_view name, DType dtype,
                                            std::span<const int64_t> shape) const {
  KDT_ASSIGN_OR_RETURN(TensorView tensor, Find(name));
  const absl::Status fits = Expect(tensor, dtype, shape);
  if (!fits.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(files_[where_.find(name)->second]->path(), ": ", fits.message()));
  }
  return tensor;
}

void Checkpoint::DropPages(const TensorView& tensor, std::span<const std::byte> bytes) const {
  const auto it = where_.find(tensor.name);
  KDT_CHECK(it != where_.end());
  files_[it->second]->DropPages(bytes);
}

std::string Checkpoint::Digest() const {
  Hasher hasher;
  hasher.Add(config_text_);
  for (const auto& [name, file] : where_) {
    const TensorView& tensor = files_[file]->tensors().find(name)->second;
    hasher.Add(name);
    hasher.Add(DTypeName(tensor.dtype));
    for (const int64_t extent : tensor.shape) hasher.Add(absl::StrCat(extent));
  }
  return absl::StrFormat("%016x", hasher.value());
}

}  // namespace kdt

#include "coordinator/tokenizer/tokenizer.h"

#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "common/utf8.h"
#include "coordinator/tokenizer/byte_pairs.h"
#include "coordinator/tokenizer/special_names.h"
#include "coordinator/tokenizer/split_pattern.h"
#include "coordinator/tokenizer/text_cut.h"
#include "coordinator/tokenizer/vocabulary.h"

namespace kdt {
namespace {

constexpr size_t kMaxFileBytes = size_t{256} << 20;

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return absl::NotFoundError(absl::StrCat(path, ": cannot be opened"));
  const std::streamoff size = file.tellg();
  if (size < 0) return absl::InvalidArgumentError(absl::StrCat(path, ": cannot be read"));
  if (static_cast<uint64_t>(size) > kMaxFileBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": has ", size, " bytes, at most ", kMaxFileBytes, " go"));
  }
  std::string content(static_cast<size_t>(size), '\0');
  file.seekg(0);
  if (!file.read(content.data(), size))
    return absl::InvalidArgumentError(absl::StrCat(path, ": cannot be read"));
  return content;
}

std::vector<std::string_view> RankBytes(const Vocabulary& vocabulary) {
  std::vector<std::string_view> tokens(vocabulary.ranks());
  for (uint32_t id = 0; id < vocabulary.ranks(); ++id) tokens[id] = vocabulary.Bytes(id);
  return tokens;
}

}  // namespace

struct Tokenizer::Impl {
  Impl(Vocabulary v, SplitPattern s)
      : vocabulary(std::move(v)), split(std::move(s)), byte_pairs(RankBytes(vocabulary)) {
    for (uint32_t id = vocabulary.ranks(); id < vocabulary.size(); ++id) {
      KDT_CHECK(specials.Add(vocabulary.Bytes(id), id));
    }
  }

  absl::Status EncodeOrdinary(std::string_view text, std::vector<uint32_t>* ids) const {
    return split.Split(text, [&](std::string_view piece) { byte_pairs.Encode(piece, ids); });
  }

  // Control tokens by name, ordinary text between them.
  absl::Status EncodeSpecial(std::string_view text, std::vector<uint32_t>* ids) const {
    size_t from = 0;
    while (const auto hit = specials.Search(text, from)) {
      KDT_RETURN_IF_ERROR(EncodeOrdinary(text.substr(from, hit->offset - from), ids));
      ids->push_back(hit->id);
      from = hit->offset + hit->length;
    }
    return EncodeOrdinary(text.substr(from), ids);
  }

  const Vocabulary vocabulary;
  const SplitPattern split;
  const BytePairs byte_pairs;  // holds views into the vocabulary
  SpecialNames specials;
};

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::~Tokenizer() = default;

absl::StatusOr<std::shared_ptr<const Tokenizer>> Tokenizer::Load(const std::string& model_dir) {
  TokenizerFiles files;
  files.name_prefix = model_dir.empty() || model_dir.back() == '/' ? model_dir : model_dir + "/";
  KDT_ASSIGN_OR_RETURN(files.tiktoken_model, ReadFile(files.name_prefix + "tiktoken.model"));
  KDT_ASSIGN_OR_RETURN(files.tokenizer_config, ReadFile(files.name_prefix + "tokenizer_config.json"));
  KDT_ASSIGN_OR_RETURN(files.config, ReadFile(files.name_prefix + "config.json"));
  return Parse(files);
}

absl::StatusOr<std::shared_ptr<const Tokenizer>> Tokenizer::Parse(const TokenizerFiles& files) {
  KDT_ASSIGN_OR_RETURN(Vocabulary vocabulary, Vocabulary::Parse(files));
  KDT_ASSIGN_OR_RETURN(SplitPattern split, SplitPattern::Create());
  auto impl = std::make_unique<Impl>(std::move(vocabulary), std::move(split));
  return std::shared_ptr<const Tokenizer>(new Tokenizer(std::move(impl)));
}

absl::Status Tokenizer::EncodeTo(std::string_view text, bool parse_special,
                                 std::vector<uint32_t>* ids) const {
  if (const auto offset = FirstInvalidUtf8(text)) {
    return absl::InvalidArgumentError(absl::StrCat("text is not valid UTF-8 at byte ", *offset));
  }
  const size_t before = ids->size();
  const absl::Status status = ForEachCut(text, [&](std::string_view part) {
    return parse_special ? impl_->EncodeSpecial(part, ids) : impl_->EncodeOrdinary(part, ids);
  });
  if (!status.ok()) ids->resize(before);
  return status;
}

absl::StatusOr<std::vector<uint32_t>> Tokenizer::Encode(std::string_view text, bool parse_special) const {
  std::vector<uint32_t> ids;
  KDT_RETURN_IF_ERROR(EncodeTo(text, parse_special, &ids));
  return ids;
}

absl::StatusOr<std::string> Tokenizer::Decode(std::span<const uint32_t> ids, bool skip_special) const {
  std::string bytes;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= vocab_size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("ids[", i, "] is ", ids[i], ", the vocabulary has ", vocab_size()));
    }
    if (!skip_special || !IsSkippedSpecial(ids[i])) bytes += impl_->vocabulary.Bytes(ids[i]);
  }
  if (!FirstInvalidUtf8(bytes)) return bytes;
  std::string text;
  if (AppendUtf8(bytes, &text) < bytes.size()) text += kReplacementCharacter;
  return text;
}

absl::StatusOr<std::string_view> Tokenizer::TokenBytes(uint32_t id) const {
  if (id >= vocab_size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("token id ", id, " is out of range, the vocabulary has ", vocab_size()));
  }
  return impl_->vocabulary.Bytes(id);
}

uint32_t Tokenizer::vocab_size() const { return impl_->vocabulary.size(); }

bool Tokenizer::IsSpecial(uint32_t id) const { return id >= impl_->vocabulary.ranks() && id < vocab_size(); }

bool Tokenizer::IsSkippedSpecial(uint32_t id) const {
  return IsSpecial(id) && impl_->vocabulary.IsSkipped(id);
}

absl::StatusOr<uint32_t> Tokenizer::SpecialId(std::string_view name) const {
  const std::optional<uint32_t> id = impl_->specials.Find(name);
  if (!id)
    return absl::NotFoundError(
        absl::StrCat("the vocabulary has no control token \"", std::string(name), "\""));
  return *id;
}

}  // namespace kdt

#include "coordinator/tokenizer/split_pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <string>

#include "absl/strings/str_cat.h"

namespace kdt {
namespace {

// \s as Unicode's White_Space: PCRE2's own \s also has U+180E.
#define KDT_SPACE "\\t-\\r\\x{85}\\p{Z}"
// PCRE2 has no class intersection, so [A && not Han] is written as everything outside (not A, or Han). The
// general categories L, M, N, P, S, Z and C cover all characters. sc: is the Script property; a plain \p{Han}
// would mean Script_Extensions.
#define KDT_UPPER "[^\\p{sc:Han}\\p{Ll}\\p{N}\\p{P}\\p{S}\\p{Z}\\p{C}]"         // Lu Lt Lm Lo M
#define KDT_LOWER "[^\\p{sc:Han}\\p{Lu}\\p{Lt}\\p{N}\\p{P}\\p{S}\\p{Z}\\p{C}]"  // Ll Lm Lo M
#define KDT_PREFIX "[^\\r\\n\\p{L}\\p{N}]?"
#define KDT_CONTRACTION "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

constexpr char kPattern[] =
    "\\p{sc:Han}+"
    "|" KDT_PREFIX KDT_UPPER "*" KDT_LOWER "+" KDT_CONTRACTION "|" KDT_PREFIX KDT_UPPER "+" KDT_LOWER
    "*" KDT_CONTRACTION
    "|\\p{N}{1,3}"
    "| ?[^" KDT_SPACE
    "\\p{L}\\p{N}]+[\\r\\n]*"
    "|[" KDT_SPACE
    "]*[\\r\\n]+"
    "|[" KDT_SPACE "]+(?![^" KDT_SPACE
    "])"
    "|[" KDT_SPACE "]+";

std::string ErrorText(int code) {
  PCRE2_UCHAR buffer[256];
  if (pcre2_get_error_message(code, buffer, sizeof(buffer)) < 0) return absl::StrCat("PCRE2 error ", code);
  return reinterpret_cast<const char*>(buffer);
}

}  // namespace

struct SplitPattern::Code {
  pcre2_code* code = nullptr;
  ~Code() { pcre2_code_free(code); }
};

SplitPattern::SplitPattern(std::shared_ptr<const Code> code) : code_(std::move(code)) {}

absl::StatusOr<SplitPattern> SplitPattern::Create() {
  int error = 0;
  PCRE2_SIZE offset = 0;
  auto code = std::make_shared<Code>();
  code->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(kPattern), sizeof(kPattern) - 1,
                             PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED, &error, &offset, nullptr);
  if (code->code == nullptr) {
    return absl::InternalError(absl::StrCat("split pattern, offset ", offset, ": ", ErrorText(error),
                                            " (PCRE2 10.40 or newer is needed)"));
  }
  // Without JIT support in the library the interpreter gives the same pieces, only slower.
  pcre2_jit_compile(code->code, PCRE2_JIT_COMPLETE);
  return SplitPattern(std::move(code));
}

absl::Status SplitPattern::Split(std::string_view text,
                                 absl::FunctionRef<void(std::string_view)> take) const {
  const std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> match(
      pcre2_match_data_create(1, nullptr), &pcre2_match_data_free);
  if (match == nullptr) return absl::ResourceExhaustedError("no memory to split text");
  const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(match.get());
  const auto subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  for (size_t start = 0; start < text.size();) {
    int rc = pcre2_match(code_->code, subject, text.size(), start, PCRE2_NO_UTF_CHECK, match.get(), nullptr);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT) {
      rc = pcre2_match(code_->code, subject, text.size(), start, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT,
                       match.get(), nullptr);
    }
    // The alternatives cover every character, so that a match always exists and is never empty.
    if (rc < 0)
      return absl::InternalError(absl::StrCat("splitting text at byte ", start, ": ", ErrorText(rc)));
    take(text.substr(start, ends[1] - start));
    start = ends[1];
  }
  return absl::OkStatus();
}

}  // namespace kdt

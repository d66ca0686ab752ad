#include "coordinator/tokenizer/text_cut.h"

#include "common/status.h"
#include "common/utf8.h"

namespace kdt {
namespace {

bool IsSpace(char32_t c) {
  if (c < 0x80) return c == ' ' || (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x1F);
  return c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 ||
         c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

}  // namespace

absl::Status ForEachCut(std::string_view text, absl::FunctionRef<absl::Status(std::string_view)> take) {
  size_t start = 0;  // of the part that is being gathered
  size_t block = 0;  // characters in the block
  size_t run = 0;    // characters in the run
  bool run_is_space = false;
  for (size_t i = 0; i < text.size();) {
    const Utf8Unit unit = NextUtf8(text.substr(i));
    const bool is_space = IsSpace(unit.code);
    if (block == kMaxBlockCharacters) {
      KDT_RETURN_IF_ERROR(take(text.substr(start, i - start)));
      start = i;
      block = 0;
      run = 0;
    }
    if (run != 0 && is_space == run_is_space) {
      if (run == kMaxRunCharacters) {
        KDT_RETURN_IF_ERROR(take(text.substr(start, i - start)));
        start = i;
        run = 0;
      }
    } else {
      run = 0;
      run_is_space = is_space;
    }
    ++run;
    ++block;
    i += unit.length;
  }
  if (start == text.size()) return absl::OkStatus();
  return take(text.substr(start));
}

}  // namespace kdt

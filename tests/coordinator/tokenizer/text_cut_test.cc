#include "coordinator/tokenizer/text_cut.h"

#include <vector>

#include "tests/coordinator/tokenizer/golden_tokenizer.h"

namespace kdt {
namespace {

std::vector<std::string> Cuts(std::string_view text) {
  std::vector<std::string> parts;
  CHECK(ForEachCut(text, [&](std::string_view part) {
          parts.emplace_back(part);
          return absl::OkStatus();
        }).ok());
  return parts;
}

std::vector<size_t> Sizes(const std::vector<std::string>& parts) {
  std::vector<size_t> sizes;
  for (const std::string& part : parts) sizes.push_back(part.size());
  return sizes;
}

using List = std::vector<size_t>;

TEST_CASE("text cut: runs of 25,000") {
  CHECK(Cuts("").empty());
  CHECK(Cuts("a b").size() == 1);
  CHECK(Sizes(Cuts(std::string(25'000, 'x'))) == List{25'000});
  CHECK(Sizes(Cuts(std::string(25'001, 'x'))) == List{25'000, 1});
  CHECK(Sizes(Cuts(std::string(60'000, ' '))) == List{25'000, 25'000, 10'000});
  // A run that another one ends is not cut, and a cut part goes on into what follows.
  CHECK(Sizes(Cuts(std::string(25'000, 'x') + std::string(25'000, ' '))) == List{50'000});
  CHECK(Sizes(Cuts("a " + std::string(25'001, 'x') + " b")) == List{25'002, 3});
}

TEST_CASE("text cut: characters are counted, not bytes") {
  std::string text;
  for (int i = 0; i < 25'001; ++i) text += "\u4E2D";
  CHECK(Sizes(Cuts(text)) == List{75'000, 3});
}

TEST_CASE("text cut: blocks of 400,000 start their runs anew") {
  std::string text;
  for (int i = 0; i < 199'999; ++i) text += "x ";  // 399,998 characters
  text += std::string(25'002, 'y');
  CHECK(Sizes(Cuts(text)) == List{400'000, 25'000});
  CHECK(Sizes(Cuts(text + "z")) == List{400'000, 25'000, 1});
}

TEST_CASE("text cut: white space is Python's") {
  for (const char* space : {"\x1C", "\u0085", "\u00A0", "\u3000", "\u2028"}) {
    std::string text;
    for (int i = 0; i < 20'000; ++i) text += ' ';
    for (int i = 0; i < 5'001; ++i) text += space;
    CHECK(Cuts(text).size() == 2);
  }
  std::string text(20'000, 'x');
  for (int i = 0; i < 5'001; ++i) text += "\u180E";  // no white space since Unicode 6.3
  CHECK(Cuts(text).size() == 2);
}

TEST_CASE("text cut: an error ends it") {
  int calls = 0;
  const absl::Status status = ForEachCut(std::string(100'000, 'x'), [&](std::string_view) {
    ++calls;
    return absl::CancelledError("enough");
  });
  CHECK(status.code() == absl::StatusCode::kCancelled);
  CHECK(calls == 1);
}

}  // namespace
}  // namespace kdt

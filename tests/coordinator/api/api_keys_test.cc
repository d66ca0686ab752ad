// The file of API keys, and which headers are let in.
#include "coordinator/api/api_keys.h"

#include "common/process.h"
#include "tests/support/catch.h"
#include "tests/support/certificates.h"

namespace kdt::testing {
namespace {

struct KeyFile {
  explicit KeyFile(const std::string& text) : dir(*MakeTempDir("kdt-test-")), path(dir + "/keys") {
    WriteFile(path, text);
  }
  ~KeyFile() { RemoveTree(dir); }
  absl::StatusOr<ApiKeys> Load() const { return ApiKeys::Load("--api_keys_file", path); }
  std::string Error() const {
    const auto keys = Load();
    REQUIRE_FALSE(keys.ok());
    CHECK(keys.status().code() == absl::StatusCode::kInvalidArgument);
    const std::string text(keys.status().message());
    CHECK(text.rfind("--api_keys_file: " + path, 0) == 0);
    return text;
  }
  const std::string dir, path;
};

}  // namespace

TEST_CASE("one key a line; blank lines, comments and blanks around a key are skipped") {
  const KeyFile file("# for tests\r\n\n  first-key \r\nsecond/key+=\n#third\n");
  const auto keys = file.Load();
  REQUIRE(keys.ok());
  CHECK(keys->size() == 2);
  for (const char* header :
       {"Bearer first-key", "Bearer second/key+=", "bearer first-key", "BEARER first-key"}) {
    INFO(header);
    CHECK(keys->CheckHeader(header).ok());
  }
  const std::string missing(keys->CheckHeader("").message());
  for (const char* header : {"", "Bearer", "Bearer ", "Bearer first-ke", "Bearer first-key2",
                             "Bearer  first-key", "Bearer first-key ", "Bearer FIRST-KEY", "first-key",
                             "Basic first-key", "Bearer #third", "Bearer third", "Bearer # for tests"}) {
    INFO(header);
    const absl::Status status = keys->CheckHeader(header);
    CHECK(status.code() == absl::StatusCode::kUnauthenticated);
    CHECK(status.message() == missing);
  }
}

TEST_CASE("a file without a usable key is refused, and no key is told") {
  CHECK(KeyFile("").Error().find("holds no key") != std::string::npos);
  CHECK(KeyFile("# nothing\n\n").Error().find("holds no key") != std::string::npos);
  const std::string text = KeyFile("good\nwith blank\n").Error();
  CHECK(text.find("line 2") != std::string::npos);
  CHECK(text.find("with blank") == std::string::npos);
  CHECK(KeyFile("k\xc3\xa9y\n").Error().find("line 1") != std::string::npos);
  const auto missing = ApiKeys::Load("--api_keys_file", "/no/such/file");
  REQUIRE_FALSE(missing.ok());
  CHECK(std::string(missing.status().message()).rfind("--api_keys_file: /no/such/file", 0) == 0);
}

}  // namespace kdt::testing

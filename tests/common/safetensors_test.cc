#include "common/safetensors.h"

#include <sys/mman.h>
#include <unistd.h>

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tests/common/support.h"
#include "tests/support/catch.h"

namespace kdt {
namespace {

using Catch::Matchers::ContainsSubstring;

std::string OpenError(const std::string& path) {
  const auto file = SafetensorsFile::Open(path);
  return file.ok() ? "opened" : std::string(file.status().message());
}

// Opens a file with this header and `data_bytes` zero bytes of data.
std::string HeaderError(const std::string& header, size_t data_bytes) {
  TempFolder folder;
  WriteFile(folder / "x.safetensors", Safetensors(header, std::string(data_bytes, '\0')));
  return OpenError(folder / "x.safetensors");
}

std::string Entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return absl::StrCat("\"", name, R"(":{"dtype":")", dtype, R"(","shape":)", shape, R"(,"data_offsets":)",
                      offsets, "}");
}

std::string Header(const std::vector<std::string>& entries) {
  return absl::StrCat("{", absl::StrJoin(entries, ","), "}");
}

TEST_CASE("a well-formed file gives its tensors") {
  TempFolder folder;
  const float values[] = {1.5f, -2.0f, 0.25f, 8.0f, 0.0f, 1.0f};
  std::string data(reinterpret_cast<const char*>(values), sizeof(values));
  data += std::string("\x80\x3f", 2);
  WriteFile(
      folder / "x.safetensors",
      Safetensors(Header({R"("__metadata__":{"format":"pt"})", Entry("a", "F32", "[2,3]", "[0,24]"),
                          Entry("scalar", "BF16", "[]", "[24,26]"), Entry("none", "F32", "[0,7]", "[0,0]")}),
                  data));
  const auto file = SafetensorsFile::Open(folder / "x.safetensors");
  REQUIRE(file.ok());
  CHECK((*file)->tensors().size() == 3);
  const auto a = (*file)->Find("a");
  REQUIRE(a.ok());
  CHECK(a->shape == std::vector<int64_t>{2, 3});
  CHECK(a->As<float>()[3] == 8.0f);
  CHECK(Expect(*a, DType::kF32, std::vector<int64_t>{2, 3}).ok());
  CHECK_THAT(std::string(Expect(*a, DType::kBF16, std::vector<int64_t>{2, 3}).message()),
             ContainsSubstring("\"a\"") && ContainsSubstring("F32") && ContainsSubstring("BF16"));
  CHECK_THAT(std::string(Expect(*a, DType::kF32, std::vector<int64_t>{3, 2}).message()),
             ContainsSubstring("[2, 3]") && ContainsSubstring("[3, 2]"));
  CHECK((*file)->Find("scalar")->As<uint16_t>()[0] == 0x3f80);
  CHECK((*file)->Find("none")->bytes.empty());
  CHECK_THAT(std::string((*file)->Find("b").status().message()),
             ContainsSubstring("\"b\"") && ContainsSubstring("x.safetensors"));
}

TEST_CASE("hostile headers are refused with the tensor's name") {
  const auto one = [](const std::string& dtype, const std::string& shape, const std::string& offsets,
                      size_t bytes) {
    return HeaderError(Header({Entry("t", dtype, shape, offsets)}), bytes);
  };
  CHECK(one("F32", "[2]", "[0,8]", 8) == "opened");
  CHECK_THAT(one("F99", "[2]", "[0,8]", 8), ContainsSubstring("\"t\"") && ContainsSubstring("F99"));
  CHECK_THAT(one("F32", "[3]", "[0,8]", 8), ContainsSubstring("takes 12 bytes"));
  CHECK_THAT(one("F32", "[2]", "[0,16]", 8), ContainsSubstring("truncated"));
  CHECK_THAT(one("F32", "[2]", "[8,0]", 8), ContainsSubstring("end before"));
  CHECK_THAT(one("F32", "[4294967296,4294967296]", "[0,8]", 8), ContainsSubstring("overflows"));
  CHECK_THAT(one("F32", "[4611686018427387904]", "[0,8]", 8), ContainsSubstring("overflows"));
  CHECK_THAT(one("F32", "[0,4294967296,4294967296]", "[0,0]", 0), ContainsSubstring("overflows"));
  CHECK_THAT(one("F32", "[18446744073709551615]", "[0,8]", 8), ContainsSubstring("63 bits"));
  CHECK_THAT(one("F32", "[18446744073709551616]", "[0,8]", 8), ContainsSubstring("\"t\""));
  CHECK_THAT(one("F32", "[-2]", "[0,8]", 8), ContainsSubstring("negative"));
  CHECK_THAT(one("F32", "[2.0]", "[0,8]", 8), ContainsSubstring("integers"));
  CHECK_THAT(one("F32", "[2]", "[0,8,9]", 8), ContainsSubstring("two numbers"));
  CHECK_THAT(one("F32", "[2]", "[0]", 8), ContainsSubstring("two numbers"));
  CHECK_THAT(one("F32", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,2]", "[0,8]", 8), ContainsSubstring("dimensions"));
  CHECK_THAT(one("F32", "[[2]]", "[0,8]", 8), ContainsSubstring("list"));
  CHECK_THAT(one("F32", "[2]", "[0,8]", 12), ContainsSubstring("4 bytes belong to no tensor"));
  CHECK_THAT(one("F32", "[2]", "[4,12]", 12), ContainsSubstring("hole"));
}

TEST_CASE("tensors may neither overlap nor repeat") {
  CHECK_THAT(HeaderError(Header({Entry("a", "F32", "[2]", "[0,8]"), Entry("b", "F32", "[2]", "[4,12]")}), 12),
             ContainsSubstring("overlaps"));
  CHECK_THAT(HeaderError(Header({Entry("a", "F32", "[2]", "[0,8]"), Entry("b", "F32", "[2]", "[0,8]")}), 8),
             ContainsSubstring("overlaps"));
  CHECK_THAT(HeaderError(Header({Entry("a", "F32", "[2]", "[0,8]"), Entry("a", "F32", "[2]", "[8,16]")}), 16),
             ContainsSubstring("\"a\"") && ContainsSubstring("twice"));
  CHECK_THAT(HeaderError(R"({"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8),
             ContainsSubstring("twice"));
  CHECK_THAT(HeaderError(R"({"a":{"dtype":"F32","shape":[2]}})", 8), ContainsSubstring("must have"));
  CHECK_THAT(HeaderError(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1}})", 8),
             ContainsSubstring("not known"));
  CHECK_THAT(HeaderError(Header({Entry("b", "U8", "[1]", "[0,1]"), Entry("w", "F32", "[1]", "[1,5]")}), 5),
             ContainsSubstring("aligned"));
}

TEST_CASE("broken files are refused with their name") {
  TempFolder folder;
  const std::string path = folder / "x.safetensors";
  CHECK_THAT(OpenError(path), ContainsSubstring("x.safetensors") && ContainsSubstring("cannot be opened"));
  WriteFile(path, "abc");
  CHECK_THAT(OpenError(path), ContainsSubstring("truncated"));
  WriteFile(path, "");
  CHECK_THAT(OpenError(path), ContainsSubstring("truncated"));
  WriteFile(path, std::string("\xff\xff\xff\xff\xff\xff\xff\xff{}", 10));
  CHECK_THAT(OpenError(path), ContainsSubstring("over 100 MB"));
  WriteFile(path, std::string("\x00\x10\x00\x00\x00\x00\x00\x00{}", 10));
  CHECK_THAT(OpenError(path), ContainsSubstring("past the end"));
  CHECK_THAT(OpenError(folder.path()), ContainsSubstring("regular file"));
  for (const char* header :
       {"{", "[]", "7", "nul", "{\"a\":3}", "{\"a\":null}", "{\"a\":{\"dtype\":\"\xff\"}}", "\"x\""}) {
    INFO(header);
    CHECK(HeaderError(header, 0) != "opened");
  }
  CHECK(HeaderError(std::string(100000, '['), 0) != "opened");
}

std::string OpenFolderError(const TempFolder& folder) {
  const auto checkpoint = Checkpoint::Open(folder.path());
  return checkpoint.ok() ? "opened" : std::string(checkpoint.status().message());
}

TEST_CASE("index and shards must agree") {
  TempFolder folder;
  const std::string shard1 = Safetensors(Header({Entry("a", "F32", "[2]", "[0,8]")}), std::string(8, 'x'));
  const std::string shard2 = Safetensors(Header({Entry("b", "F32", "[2]", "[0,8]")}), std::string(8, 'y'));
  const std::string index = R"({"metadata":{},"weight_map":{"a":"m1.safetensors","b":"m2.safetensors"}})";
  CHECK_THAT(OpenFolderError(folder), ContainsSubstring("model.safetensors"));
  WriteFile(folder / "model.safetensors.index.json", index);
  WriteFile(folder / "m1.safetensors", shard1);
  CHECK_THAT(OpenFolderError(folder),
             ContainsSubstring("m2.safetensors") && ContainsSubstring("cannot be opened"));
  WriteFile(folder / "m2.safetensors", shard2);
  CHECK(OpenFolderError(folder) == "opened");
  WriteFile(folder / "m2.safetensors", shard2.substr(0, shard2.size() - 3));
  CHECK_THAT(OpenFolderError(folder), ContainsSubstring("m2.safetensors") && ContainsSubstring("truncated"));
  WriteFile(folder / "m2.safetensors", shard1);
  CHECK_THAT(OpenFolderError(folder), ContainsSubstring("m2.safetensors") && ContainsSubstring("not listed"));
  WriteFile(folder / "m2.safetensors", Safetensors("{}", ""));
  CHECK_THAT(OpenFolderError(folder),
             ContainsSubstring("m2.safetensors") && ContainsSubstring("\"b\" is missing"));
  WriteFile(folder / "m2.safetensors", shard2);
  WriteFile(folder / "model.safetensors.index.json", ReplaceOnce(index, "m2.", "../m2."));
  CHECK_THAT(OpenFolderError(folder), ContainsSubstring("weight_map.b") && ContainsSubstring("same folder"));
  WriteFile(folder / "model.safetensors.index.json", R"({"weight_map":{}})");
  CHECK_THAT(OpenFolderError(folder), ContainsSubstring("empty"));
  WriteFile(folder / "model.safetensors.index.json", R"({"weight_map":{"a":1}})");
  CHECK_THAT(OpenFolderError(folder), ContainsSubstring("weight_map.a"));
}

TEST_CASE("the reference checkpoints open, and a digest tells headers and configs apart") {
  const auto model = Checkpoint::Open(KDT_GOLDENS_DIR "/model");
  REQUIRE(model.ok());
  CHECK(model->total_bytes() == 4564544);
  const auto packed = model->Find("language_model.model.layers.1.mlp.experts.0.down_proj.weight_packed",
                                  DType::kI32, {128, 32});
  REQUIRE(packed.ok());
  CHECK_THAT(
      std::string(model->Find("language_model.lm_head.weight", DType::kF32, {1024, 128}).status().message()),
      ContainsSubstring(".safetensors") && ContainsSubstring("language_model.lm_head.weight") &&
          ContainsSubstring("BF16"));
  const auto drafter = Checkpoint::Open(KDT_GOLDENS_DIR "/drafter");
  REQUIRE(drafter.ok());
  CHECK(model->Digest().size() == 16);
  CHECK(model->Digest() == Checkpoint::Open(KDT_GOLDENS_DIR "/model")->Digest());
  CHECK(model->Digest() != drafter->Digest());

  TempFolder copy;
  std::filesystem::copy(KDT_GOLDENS_DIR "/drafter", copy.path(), std::filesystem::copy_options::recursive);
  CHECK(Checkpoint::Open(copy.path())->Digest() == drafter->Digest());
  WriteFile(copy / "config.json", ReadFile(copy / "config.json") + "\n");
  CHECK(Checkpoint::Open(copy.path())->Digest() != drafter->Digest());
}

size_t ResidentPages(std::span<const std::byte> bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  // smaps would be exact for this process; mincore tells about the page cache. Count through /proc/self/statm
  // instead.
  std::ifstream statm("/proc/self/statm");
  size_t total = 0, resident = 0;
  statm >> total >> resident;
  CHECK(bytes.size() > page);
  return resident;
}

TEST_CASE("dropped pages leave resident memory and can be read again") {
  TempFolder folder;
  constexpr size_t kBytes = size_t{32} << 20;
  WriteFile(
      folder / "model.safetensors",
      Safetensors(Header({Entry("a", "U8", "[33554432]", "[0,33554432]")}), std::string(kBytes, '\x07')));
  const auto checkpoint = Checkpoint::Open(folder.path());
  REQUIRE(checkpoint.ok());
  const auto tensor = checkpoint->Find("a");
  const auto sum = [&] {
    uint64_t total = 0;
    for (const uint8_t value : tensor->As<uint8_t>()) total += value;
    return total;
  };
  CHECK(sum() == 7 * kBytes);
  const size_t before = ResidentPages(tensor->bytes);
  checkpoint->DropPages(*tensor);
  const size_t after = ResidentPages(tensor->bytes);
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  CHECK(before - after > kBytes / page / 2);
  CHECK(sum() == 7 * kBytes);
}

}  // namespace
}  // namespace kdt

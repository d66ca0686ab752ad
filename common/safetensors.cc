#include "common/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/checked.h"
#include "common/safetensors_header.h"
#include "common/status.h"

namespace kdt {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors is little-endian and read in place");

constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr size_t kPrefixBytes = 8;

std::string ShapeText(std::span<const int64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

absl::Status FileError(const std::string& path, absl::string_view message) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", message));
}

// Tensors must tile the data region: in order of their offsets each begins where the one before ended.
absl::Status CheckLayout(const std::string& path, const std::map<std::string, HeaderEntry>& entries,
                         uint64_t data_bytes) {
  std::vector<std::pair<const std::string*, const HeaderEntry*>> order;
  for (const auto& [name, entry] : entries) order.emplace_back(&name, &entry);
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second->begin, a.second->end) < std::pair(b.second->begin, b.second->end);
  });
  uint64_t expected = 0;
  for (const auto& [name, entry] : order) {
    const auto fail = [&](absl::string_view message) {
      return FileError(path, absl::StrCat("tensor \"", *name, "\": ", message));
    };
    const std::optional<uint64_t> elements = CheckedProduct(entry->shape);
    const std::optional<uint64_t> bytes =
        elements ? CheckedMul(*elements, DTypeSize(entry->dtype)) : std::nullopt;
    if (!bytes) return fail(absl::StrCat("shape ", ShapeText(entry->shape), " overflows"));
    if (entry->end < entry->begin) return fail("data_offsets end before they begin");
    if (entry->end > data_bytes) {
      return fail(absl::StrCat("data ends at byte ", entry->end, " of a data region of ", data_bytes,
                               " bytes: the file is truncated"));
    }
    if (entry->end - entry->begin != *bytes) {
      return fail(absl::StrCat("shape ", ShapeText(entry->shape), " of ", DTypeName(entry->dtype), " takes ",
                               *bytes, " bytes, data_offsets give ", entry->end - entry->begin));
    }
    if (entry->begin < expected) return fail("overlaps another tensor");
    if (entry->begin > expected) return fail("leaves a hole before it");
    expected = entry->end;
  }
  if (expected != data_bytes)
    return FileError(path, absl::StrCat(data_bytes - expected, " bytes belong to no tensor"));
  return absl::OkStatus();
}

}  // namespace

absl::Status Expect(const TensorView& tensor, DType dtype, std::span<const int64_t> shape) {
  if (tensor.dtype != dtype) {
    return absl::InvalidArgumentError(absl::StrCat("tensor \"", tensor.name, "\": dtype is ",
                                                   DTypeName(tensor.dtype), ", must be ", DTypeName(dtype)));
  }
  if (!std::equal(shape.begin(), shape.end(), tensor.shape.begin(), tensor.shape.end())) {
    return absl::InvalidArgumentError(absl::StrCat("tensor \"", tensor.name, "\": shape is ",
                                                   ShapeText(tensor.shape), ", must be ", ShapeText(shape)));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<SafetensorsFile>> SafetensorsFile::Open(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    const int error = errno;
    return absl::Status(error == ENOENT ? absl::StatusCode::kNotFound : absl::StatusCode::kFailedPrecondition,
                        absl::StrCat(path, ": cannot be opened: ", std::strerror(error)));
  }
  struct stat info {};
  const bool regular = fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
  const uint64_t size = regular ? static_cast<uint64_t>(info.st_size) : 0;
  if (size < kPrefixBytes) {
    close(fd);
    return FileError(path, regular ? "shorter than 8 bytes: the file is truncated" : "not a regular file");
  }
  void* base = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
  const int map_error = errno;
  close(fd);
  if (base == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat(path, ": cannot be mapped: ", std::strerror(map_error)));
  }
  std::unique_ptr<SafetensorsFile> file(new SafetensorsFile);
  file->path_ = path;
  file->base_ = static_cast<const std::byte*>(base);
  file->size_ = size;

  uint64_t header_bytes;
  std::memcpy(&header_bytes, file->base_, sizeof(header_bytes));
  if (header_bytes > kMaxHeaderBytes)
    return FileError(path, absl::StrCat("header of ", header_bytes, " bytes is over 100 MB"));
  if (header_bytes > size - kPrefixBytes)
    return FileError(path, "header reaches past the end: the file is truncated");
  const absl::string_view header(reinterpret_cast<const char*>(file->base_) + kPrefixBytes, header_bytes);
  absl::StatusOr<std::map<std::string, HeaderEntry>> entries = ParseSafetensorsHeader(header);
  if (!entries.ok()) return FileError(path, entries.status().message());
  const uint64_t data_start = kPrefixBytes + header_bytes;
  KDT_RETURN_IF_ERROR(CheckLayout(path, *entries, size - data_start));
  for (auto& [name, entry] : *entries) {
    if ((data_start + entry.begin) % DTypeSize(entry.dtype) != 0) {
      return FileError(path, absl::StrCat("tensor \"", name, "\": data is not aligned to its dtype"));
    }
    file->tensors_.emplace(name,
                           TensorView{name,
                                      entry.dtype,
                                      std::move(entry.shape),
                                      {file->base_ + data_start + entry.begin, entry.end - entry.begin}});
  }
  return file;
}

SafetensorsFile::~SafetensorsFile() {
  if (base_ != nullptr) munmap(const_cast<std::byte*>(base_), size_);
}

absl::StatusOr<TensorView> SafetensorsFile::Find(absl::string_view name) const {
  const auto it = tensors_.find(name);
  if (it == tensors_.end())
    return absl::NotFoundError(absl::StrCat(path_, ": tensor \"", name, "\" is missing"));
  return it->second;
}

void SafetensorsFile::DropPages(std::span<const std::byte> bytes) const {
  KDT_CHECK(bytes.empty() || (bytes.data() >= base_ && bytes.data() + bytes.size() <= base_ + size_));
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(bytes.data()) + page - 1) / page * page;
  const uintptr_t end = reinterpret_cast<uintptr_t>(bytes.data() + bytes.size()) / page * page;
  // Advice only: if it fails, memory stays resident and nothing else changes.
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

}  // namespace kdt

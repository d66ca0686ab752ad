#include "common/address.h"

#include <arpa/inet.h>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace kdt {
namespace {

constexpr size_t kMaxUnixPath = 107;  // sun_path of Linux, less the final zero

}  // namespace

bool Address::is_local() const {
  if (is_unix() || host == "localhost") return true;
  in_addr v4{};
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return ntohl(v4.s_addr) >> 24 == 127;
  in6_addr v6{};
  return inet_pton(AF_INET6, host.c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

std::string Address::ToString() const {
  if (is_unix()) return absl::StrCat("unix:", unix_path);
  const bool v6 = host.find(':') != std::string::npos;
  return v6 ? absl::StrCat("[", host, "]:", port) : absl::StrCat(host, ":", port);
}

absl::StatusOr<Address> ParseAddress(absl::string_view text, absl::string_view what) {
  const auto fail = [&](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat(what, " \"", text, "\": ", why));
  };
  Address address;
  absl::string_view rest = text;
  if (absl::ConsumePrefix(&rest, "unix:")) {
    absl::ConsumePrefix(&rest, "//");
    if (rest.empty()) return fail("the path after unix: is empty");
    if (rest.size() > kMaxUnixPath)
      return fail(absl::StrCat("the path is longer than ", kMaxUnixPath, " bytes"));
    address.unix_path = std::string(rest);
    return address;
  }
  absl::string_view port;
  if (absl::ConsumePrefix(&rest, "[")) {
    const size_t close = rest.find("]:");
    if (close == absl::string_view::npos) return fail("expected [IPV6]:PORT");
    address.host = std::string(rest.substr(0, close));
    port = rest.substr(close + 2);
  } else {
    const size_t colon = rest.find(':');
    if (colon == absl::string_view::npos) return fail("expected HOST:PORT or unix:PATH");
    if (rest.find(':', colon + 1) != absl::string_view::npos)
      return fail("an IPv6 address needs brackets: [IPV6]:PORT");
    address.host = std::string(rest.substr(0, colon));
    port = rest.substr(colon + 1);
  }
  if (address.host.empty()) return fail("the host is empty");
  const bool digits = !port.empty() && port.find_first_not_of("0123456789") == absl::string_view::npos;
  if (!digits || !absl::SimpleAtoi(port, &address.port) || address.port > 65535) {
    return fail("the port must be a number from 0 to 65535");
  }
  return address;
}

}  // namespace kdt

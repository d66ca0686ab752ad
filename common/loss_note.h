// Why a worker ended, left by who watches its process for who waits for it: a file beside the worker's
// socket. Workers that listen on TCP have none.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace kdt {

// `address` as the worker listens on it, unix:PATH or HOST:PORT. A note that cannot be written is left out:
// the writer's own log tells the same.
void WriteLossNote(const std::string& address, absl::string_view why);
void RemoveLossNote(const std::string& address);
// Empty: there is none. One line of at most 1 KiB.
std::string ReadLossNote(const std::string& address);

}  // namespace kdt

// Notes between who watches a worker's process and who waits for the worker: files beside its socket. Workers
// that listen on TCP have none.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace kdt {

// Why a worker ended, for who waits for it.
// `address` as the worker listens on it, unix:PATH or HOST:PORT. A note that cannot be written is left out:
// the writer's own log tells the same.
void WriteLossNote(const std::string& address, absl::string_view why);
void RemoveLossNote(const std::string& address);
// Empty: there is none. One line of at most 1 KiB.
std::string ReadLossNote(const std::string& address);

// That a worker hangs and has to be killed, for who watches its process. False: there is no place for it.
bool WriteHangNote(const std::string& address);
// Removes it. False: there was none.
bool TakeHangNote(const std::string& address);

}  // namespace kdt

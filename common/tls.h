// TLS from PEM files: read and checked before anything listens or connects, so that a wrong file is told by
// its flag and path instead of as failed handshakes later.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace grpc {
class ChannelCredentials;
class ServerCredentials;
}  // namespace grpc

namespace kdt {

// A path and the flag it was given with ("--tls_cert"). An empty path: not given.
struct PemPath {
  std::string flag;
  std::string path;
};

// What one side of a connection shows (certificate with its key) and whom it believes (authorities).
struct TlsFiles {
  PemPath certificate;
  PemPath key;
  PemPath authorities;
};

// PEM texts; an empty one was not given.
struct TlsMaterial {
  std::string certificate;  // the own one first, then its chain
  std::string key;
  std::string authorities;
};

// INVALID_ARGUMENT names flag and file: one that cannot be read, holds no PEM of its kind, holds an encrypted
// key (nobody is there to type a passphrase), a certificate without its key or with another one's.
absl::StatusOr<TlsMaterial> LoadTls(const TlsFiles& files);

// Needs certificate and key. With authorities a client must show a certificate that they signed.
std::shared_ptr<grpc::ServerCredentials> ServerCredentials(const TlsMaterial& material);
// Without authorities the system's roots are believed. The certificate, if any, is shown to a server that
// asks for one.
std::shared_ptr<grpc::ChannelCredentials> ClientCredentials(const TlsMaterial& material);

// The file's bytes, at most `max_bytes`. INVALID_ARGUMENT names flag and path.
absl::StatusOr<std::string> ReadSmallFile(const PemPath& file, size_t max_bytes);

}  // namespace kdt

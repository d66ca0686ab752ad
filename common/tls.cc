#include "common/tls.h"

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace kdt {
namespace {

constexpr size_t kMaxPemBytes = 1 << 20;  // the system's bundle of all roots is a quarter of that

template <auto kFree>
struct Free {
  template <typename T>
  void operator()(T* pointer) const {
    kFree(pointer);
  }
};
using Bio = std::unique_ptr<BIO, Free<BIO_free_all>>;
using Certificate = std::unique_ptr<X509, Free<X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, Free<EVP_PKEY_free>>;

absl::Status Bad(const PemPath& file, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(file.flag, ": ", file.path, " ", what));
}

Bio Reader(const std::string& text) {
  return Bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

Certificate FirstCertificate(const std::string& pem) {
  const Bio reader = Reader(pem);
  Certificate certificate(PEM_read_bio_X509(reader.get(), nullptr, nullptr, nullptr));
  ERR_clear_error();
  return certificate;
}

// OpenSSL's own way to ask for a passphrase is the terminal.
int RefusePassphrase(char*, int, int, void* asked) {
  *static_cast<bool*>(asked) = true;
  return -1;
}

absl::StatusOr<Key> ReadKey(const PemPath& file, const std::string& pem) {
  bool encrypted = false;
  const Bio reader = Reader(pem);
  Key key(PEM_read_bio_PrivateKey(reader.get(), nullptr, RefusePassphrase, &encrypted));
  ERR_clear_error();
  if (encrypted) return Bad(file, "is encrypted; store the key without a passphrase");
  if (key == nullptr) return Bad(file, "holds no private key in PEM form");
  return key;
}

}  // namespace

absl::StatusOr<std::string> ReadSmallFile(const PemPath& file, size_t max_bytes) {
  struct stat info {};
  if (stat(file.path.c_str(), &info) == 0 && S_ISDIR(info.st_mode)) return Bad(file, "is a folder");
  errno = 0;
  std::ifstream in(file.path, std::ios::binary);
  if (!in) return Bad(file, absl::StrCat("cannot be read: ", std::strerror(errno)));
  std::string text(max_bytes + 1, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(in.gcount()));
  if (in.bad()) return Bad(file, "cannot be read");
  if (text.size() > max_bytes) return Bad(file, absl::StrCat("is larger than ", max_bytes, " bytes"));
  return text;
}

absl::StatusOr<TlsMaterial> LoadTls(const TlsFiles& files) {
  const auto needs = [](const PemPath& given, const PemPath& missing) {
    return absl::InvalidArgumentError(absl::StrCat(given.flag, " needs ", missing.flag, " too"));
  };
  if (!files.certificate.path.empty() && files.key.path.empty()) return needs(files.certificate, files.key);
  if (!files.key.path.empty() && files.certificate.path.empty()) return needs(files.key, files.certificate);
  TlsMaterial material;
  if (!files.certificate.path.empty()) {
    KDT_ASSIGN_OR_RETURN(material.certificate, ReadSmallFile(files.certificate, kMaxPemBytes));
    const Certificate certificate = FirstCertificate(material.certificate);
    if (certificate == nullptr) return Bad(files.certificate, "holds no certificate in PEM form");
    KDT_ASSIGN_OR_RETURN(material.key, ReadSmallFile(files.key, kMaxPemBytes));
    KDT_ASSIGN_OR_RETURN(const Key key, ReadKey(files.key, material.key));
    const bool match = X509_check_private_key(certificate.get(), key.get()) == 1;
    ERR_clear_error();
    if (!match) {
      return Bad(files.key, absl::StrCat("is not the key of the certificate in ", files.certificate.path,
                                         " (", files.certificate.flag, ")"));
    }
  }
  if (!files.authorities.path.empty()) {
    KDT_ASSIGN_OR_RETURN(material.authorities, ReadSmallFile(files.authorities, kMaxPemBytes));
    if (FirstCertificate(material.authorities) == nullptr) {
      return Bad(files.authorities, "holds no certificate in PEM form");
    }
  }
  return material;
}

std::shared_ptr<grpc::ServerCredentials> ServerCredentials(const TlsMaterial& material) {
  KDT_CHECK(!material.certificate.empty() && !material.key.empty());
  grpc::SslServerCredentialsOptions options(material.authorities.empty()
                                                ? GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE
                                                : GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  options.pem_root_certs = material.authorities;
  options.pem_key_cert_pairs.push_back({material.key, material.certificate});
  return grpc::SslServerCredentials(options);
}

std::shared_ptr<grpc::ChannelCredentials> ClientCredentials(const TlsMaterial& material) {
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = material.authorities;
  options.pem_cert_chain = material.certificate;
  options.pem_private_key = material.key;
  return grpc::SslCredentials(options);
}

}  // namespace kdt

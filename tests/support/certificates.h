// Certificates made at run time: an authority and what it signs, as PEM files in a folder of the test's.
#pragma once

#include <memory>
#include <string>

namespace kdt::testing {

struct CertificateFiles {
  std::string certificate;  // path
  std::string key;          // path
};

class Authority {
 public:
  // Writes DIR/NAME.pem, the authority's own certificate.
  Authority(const std::string& dir, const std::string& name);
  ~Authority();

  const std::string& path() const { return path_; }
  // Writes DIR/NAME.pem and DIR/NAME.key: a P-256 key, valid for a day, for "localhost" and 127.0.0.1 or,
  // when given, for the DNS name `host` alone.
  CertificateFiles Issue(const std::string& name, const std::string& host = "");

 private:
  struct Signer;
  const std::string dir_;
  std::string path_;
  std::unique_ptr<Signer> signer_;
};

void WriteFile(const std::string& path, const std::string& text);
std::string ReadWholeFile(const std::string& path);

}  // namespace kdt::testing

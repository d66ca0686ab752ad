// PEM files are checked at start, and what is wrong is told by flag and file.
#include "common/tls.h"

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <sys/stat.h>

#include <cstdio>

#include "common/address.h"
#include "common/process.h"
#include "tests/support/catch.h"
#include "tests/support/certificates.h"

namespace kdt::testing {
namespace {

struct Files {
  Files() : dir(*MakeTempDir("kdt-test-")), authority(dir, "authority") {
    server = authority.Issue("server");
    other = authority.Issue("other");
  }
  ~Files() { RemoveTree(dir); }

  absl::StatusOr<TlsMaterial> Load(const std::string& certificate, const std::string& key,
                                   const std::string& authorities = "") const {
    return LoadTls({{"--cert", certificate}, {"--key", key}, {"--ca", authorities}});
  }
  void Refuses(const absl::StatusOr<TlsMaterial>& loaded, const std::string& flag,
               const std::string& what) const {
    REQUIRE_FALSE(loaded.ok());
    const std::string text(loaded.status().message());
    INFO(text);
    CHECK(loaded.status().code() == absl::StatusCode::kInvalidArgument);
    CHECK(text.rfind(flag, 0) == 0);
    CHECK(text.find(what) != std::string::npos);
  }

  const std::string dir;
  Authority authority;
  CertificateFiles server, other;
};

void WriteEncryptedKey(const std::string& path) {
  EVP_PKEY* key = EVP_EC_gen("P-256");
  FILE* file = fopen(path.c_str(), "w");
  REQUIRE(file != nullptr);
  unsigned char secret[] = "secret";
  REQUIRE(PEM_write_PrivateKey(file, key, EVP_aes_128_cbc(), secret, sizeof(secret) - 1, nullptr, nullptr) ==
          1);
  fclose(file);
  EVP_PKEY_free(key);
}

}  // namespace

TEST_CASE("a certificate with its key, and authorities, are loaded") {
  Files files;
  const auto loaded = files.Load(files.server.certificate, files.server.key, files.authority.path());
  REQUIRE(loaded.ok());
  CHECK(loaded->certificate == ReadWholeFile(files.server.certificate));
  CHECK(loaded->key == ReadWholeFile(files.server.key));
  CHECK(loaded->authorities == ReadWholeFile(files.authority.path()));
  const auto nothing = files.Load("", "", "");
  REQUIRE(nothing.ok());
  CHECK(nothing->certificate.empty());
  CHECK(files.Load("", "", files.authority.path()).ok());
}

TEST_CASE("a wrong PEM file is told by flag and path") {
  Files files;
  const std::string &certificate = files.server.certificate, &key = files.server.key;
  files.Refuses(files.Load(certificate, ""), "--cert needs --key", "");
  files.Refuses(files.Load("", key), "--key needs --cert", "");
  const std::string missing = files.dir + "/missing.pem";
  files.Refuses(files.Load(missing, key), "--cert: " + missing, "No such file");
  files.Refuses(files.Load(certificate, missing), "--key: " + missing, "No such file");
  files.Refuses(files.Load(certificate, key, missing), "--ca: " + missing, "No such file");
  files.Refuses(files.Load(files.dir, key), "--cert: " + files.dir, "is a folder");
  const std::string junk = files.dir + "/junk.pem";
  WriteFile(junk, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n");
  files.Refuses(files.Load(junk, key), "--cert: " + junk, "no certificate");
  files.Refuses(files.Load(certificate, junk), "--key: " + junk, "no private key");
  files.Refuses(files.Load(certificate, key, files.server.key), "--ca: ", "no certificate");
  files.Refuses(files.Load(certificate, files.other.key), "--key: " + files.other.key,
                "is not the key of the certificate in " + certificate);
  WriteFile(junk, std::string((1 << 20) + 1, 'x'));
  files.Refuses(files.Load(junk, key), "--cert: " + junk, "larger than");
  const std::string encrypted = files.dir + "/encrypted.key";
  WriteEncryptedKey(encrypted);
  files.Refuses(files.Load(certificate, encrypted), "--key: " + encrypted, "is encrypted");
}

TEST_CASE("addresses that other hosts cannot reach") {
  for (const char* local : {"127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1", "unix:/tmp/s"}) {
    INFO(local);
    CHECK(ParseAddress(local, "--listen")->is_local());
  }
  for (const char* remote : {"0.0.0.0:1", "[::]:1", "10.0.0.1:1", "127.example.com:1",
                             "127.0.0.1.example.com:1", "localhost.example.com:1", "[::ffff:10.0.0.1]:1"}) {
    INFO(remote);
    CHECK_FALSE(ParseAddress(remote, "--listen")->is_local());
  }
}

}  // namespace kdt::testing

#include "tests/support/certificates.h"

#include <openssl/bio.h>
#include <openssl/ec.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include <fstream>
#include <iterator>

#include "tests/support/catch.h"

namespace kdt::testing {
namespace {

constexpr long kDaySeconds = 86400;

template <typename Write>
void WritePem(const std::string& path, const Write& write) {
  BIO* file = BIO_new_file(path.c_str(), "w");
  REQUIRE(file != nullptr);
  REQUIRE(write(file) == 1);
  BIO_free(file);
}

void Extend(X509* certificate, X509* issuer, int nid, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, &context, nid, value.c_str());
  REQUIRE(extension != nullptr);
  X509_add_ext(certificate, extension, -1);
  X509_EXTENSION_free(extension);
}

X509* NewCertificate(EVP_PKEY* key, const std::string& name, long serial) {
  X509* certificate = X509_new();
  X509_set_version(certificate, 2);  // counted from 0
  ASN1_INTEGER_set(X509_get_serialNumber(certificate), serial);
  X509_gmtime_adj(X509_getm_notBefore(certificate), -kDaySeconds);
  X509_gmtime_adj(X509_getm_notAfter(certificate), kDaySeconds);
  X509_NAME_add_entry_by_txt(X509_get_subject_name(certificate), "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
  X509_set_pubkey(certificate, key);
  return certificate;
}

}  // namespace

struct Authority::Signer {
  EVP_PKEY* key = nullptr;
  X509* certificate = nullptr;
  long serial = 1;
  ~Signer() {
    X509_free(certificate);
    EVP_PKEY_free(key);
  }
};

Authority::Authority(const std::string& dir, const std::string& name)
    : dir_(dir), path_(dir + "/" + name + ".pem"), signer_(std::make_unique<Signer>()) {
  signer_->key = EVP_EC_gen("P-256");
  REQUIRE(signer_->key != nullptr);
  X509* certificate = signer_->certificate = NewCertificate(signer_->key, name, signer_->serial++);
  X509_set_issuer_name(certificate, X509_get_subject_name(certificate));
  Extend(certificate, certificate, NID_basic_constraints, "critical,CA:TRUE");
  Extend(certificate, certificate, NID_key_usage, "critical,keyCertSign,cRLSign");
  Extend(certificate, certificate, NID_subject_key_identifier, "hash");
  REQUIRE(X509_sign(certificate, signer_->key, EVP_sha256()) > 0);
  WritePem(path_, [&](BIO* file) { return PEM_write_bio_X509(file, certificate); });
}

Authority::~Authority() = default;

CertificateFiles Authority::Issue(const std::string& name, const std::string& host) {
  const CertificateFiles files{dir_ + "/" + name + ".pem", dir_ + "/" + name + ".key"};
  EVP_PKEY* key = EVP_EC_gen("P-256");
  REQUIRE(key != nullptr);
  X509* certificate = NewCertificate(key, name, signer_->serial++);
  X509_set_issuer_name(certificate, X509_get_subject_name(signer_->certificate));
  Extend(certificate, signer_->certificate, NID_subject_alt_name,
         host.empty() ? "DNS:localhost,IP:127.0.0.1" : "DNS:" + host);
  REQUIRE(X509_sign(certificate, signer_->key, EVP_sha256()) > 0);
  WritePem(files.certificate, [&](BIO* file) { return PEM_write_bio_X509(file, certificate); });
  WritePem(files.key, [&](BIO* file) {
    return PEM_write_bio_PrivateKey(file, key, nullptr, nullptr, 0, nullptr, nullptr);
  });
  X509_free(certificate);
  EVP_PKEY_free(key);
  return files;
}

void WriteFile(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  REQUIRE(file.good());
}

std::string ReadWholeFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

}  // namespace kdt::testing

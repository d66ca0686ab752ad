#include "client/token_text.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

namespace kdt {

absl::StatusOr<std::string> QuotedToken(GenerationStub& stub, uint32_t id) {
  v1::DetokenizeRequest request;
  request.add_ids(id);
  v1::DetokenizeResponse response;
  grpc::ClientContext context;
  if (const auto status = stub.Detokenize(&context, request, &response); !status.ok()) {
    return ToAbsl(status, context);
  }
  // The apostrophe needs no escape between quotation marks.
  return absl::StrCat("\"", absl::StrReplaceAll(absl::Utf8SafeCEscape(response.text()), {{"\\'", "'"}}),
                      "\"");
}

}  // namespace kdt

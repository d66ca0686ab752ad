// kdt tokenize TEXT: ids and the text of each.
#include <cstdio>

#include "absl/flags/flag.h"
#include "client/commands.h"
#include "client/connection.h"
#include "client/report.h"
#include "client/token_text.h"

ABSL_FLAG(bool, parse_special, false, "read control tokens in the text as such");

namespace kdt {

int TokenizeCommand(const std::vector<std::string>& args) {
  if (args.size() != 1) return WrongCall("tokenize takes one text: kdt tokenize \"TEXT\"");
  const auto stub = ConnectFromFlags();
  if (!stub.ok()) return Failed(stub.status());
  v1::TokenizeRequest request;
  request.set_text(args[0]);
  request.set_parse_special(absl::GetFlag(FLAGS_parse_special));
  v1::TokenizeResponse response;
  grpc::ClientContext context;
  if (const auto status = (*stub)->Tokenize(&context, request, &response); !status.ok()) {
    return Failed(ToAbsl(status, context));
  }
  for (const uint32_t id : response.ids()) {
    const auto token = QuotedToken(**stub, id);
    if (!token.ok()) return Failed(token.status());
    std::printf("%8u  %s\n", id, token->c_str());
  }
  std::printf("%d tokens\n", response.ids_size());
  return 0;
}

}  // namespace kdt

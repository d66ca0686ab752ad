// kdt info: the model and a table of the cluster's ranks.
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/commands.h"
#include "client/connection.h"
#include "client/report.h"

namespace kdt {

int InfoCommand(const std::vector<std::string>& args) {
  if (!args.empty()) return WrongCall("info takes flags only: kdt info --server HOST:PORT");
  const auto stub = ConnectFromFlags();
  if (!stub.ok()) return Failed(stub.status());
  v1::ModelInfo model;
  grpc::ClientContext model_context;
  if (const auto status = (*stub)->GetModelInfo(&model_context, {}, &model); !status.ok()) {
    return Failed(ToAbsl(status, model_context));
  }
  v1::ClusterInfo cluster;
  grpc::ClientContext cluster_context;
  if (const auto status = (*stub)->GetClusterInfo(&cluster_context, {}, &cluster); !status.ok()) {
    return Failed(ToAbsl(status, cluster_context));
  }
  std::printf("model %s (%s), %u layers, vocabulary %u, context %u, stop tokens %s", model.name().c_str(),
              model.model_type().c_str(), model.layers(), model.vocab_size(), model.max_context(),
              absl::StrJoin(model.stop_token_ids(), ",").c_str());
  // What the ranks have loaded is known from when they first were a group.
  if (cluster.epoch() > 0) {
    const uint32_t block = model.draft_block_size();
    std::printf(", checkpoint %s\n%s", model.checkpoint_digest().c_str(),
                block == 0 ? "no drafter" : absl::StrCat("drafter with blocks of ", block).c_str());
  }
  std::printf("\n");
  // Held ones are told where there are any: while a lost group forms again nothing runs.
  const std::string held = cluster.held() > 0 ? absl::StrCat(", ", cluster.held(), " held") : "";
  std::printf("%s, epoch %llu, %u running%s, %u waiting\n", cluster.serving() ? "serving" : "NOT serving",
              static_cast<unsigned long long>(cluster.epoch()), cluster.running(), held.c_str(),
              cluster.waiting());
  if (!cluster.reason().empty()) std::printf("%s\n", cluster.reason().c_str());
  std::printf("\n");
  std::vector<std::vector<std::string>> rows = {{"rank", "up", "backend", "device", "KV slots used", "of",
                                                 "fragmentation", "steps", "busy", "last error"}};
  for (const v1::RankInfo& rank : cluster.ranks()) {
    rows.push_back({absl::StrCat(rank.rank()), rank.up() ? "yes" : "NO", rank.backend(), rank.device(),
                    absl::StrCat(rank.kv_slots_used()), absl::StrCat(rank.kv_slots_total()),
                    absl::StrFormat("%.3f", rank.kv_fragmentation()), absl::StrCat(rank.steps()),
                    absl::StrFormat("%.0f%%", 100 * rank.busy_ratio()), rank.last_error()});
  }
  PrintTable(rows);
  return cluster.serving() ? 0 : 1;
}

}  // namespace kdt

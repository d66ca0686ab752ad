// cluster_check: whole groups on the backend under test against the CPU backend's tokens. tests/gpu/run
// starts it with what a machine with GPUs needs around it.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "absl/flags/flag.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/flags.h"
#include "tests/gpu/checks.h"

ABSL_FLAG(std::string, bin_dir, "", "where kdt-launch lies; empty: ../bin beside this program");
ABSL_FLAG(std::string, model, "", "folder of the target checkpoint");
ABSL_FLAG(std::string, drafter, "", "folder of the drafter; empty: none, and no speculation");
ABSL_FLAG(std::string, prompts, "", "JSON file with prompts[].text");
ABSL_FLAG(std::string, tps, "1,2,4,8", "tensor-parallel sizes, one after the other");
ABSL_FLAG(std::string, checks, "prompts,divergence,loss,pool,batch,validate,soak",
          "which checks, in this order");
ABSL_FLAG(std::string, subject, "", "flags of kdt-launch for the group under test, separated by spaces");
ABSL_FLAG(std::string, reference, "--backend=cpu", "flags of kdt-launch for the reference, always tp 1");
ABSL_FLAG(std::string, settings, "off,chain,tree 16,tree 64",
          "speculation of the divergence check: off, chain, auto, tree N");
ABSL_FLAG(int, requests, 120, "requests a setting");
ABSL_FLAG(int, tokens, 32, "tokens a request");
ABSL_FLAG(int, concurrency, 16, "requests at once");
ABSL_FLAG(int, soak_steps, 3000, "steps of the soak");
ABSL_FLAG(double, tolerance, 1.0, "largest gap in logits at which a token may differ");
ABSL_FLAG(int, threads, 0, "compute threads of the reference; 0: the machine's cores, at most 8");
ABSL_FLAG(std::string, json, "", "file for the results; empty: none");

namespace kdt::testing {
namespace {

std::vector<std::string> Words(const std::string& text) {
  return absl::StrSplit(text, ' ', absl::SkipEmpty());
}

int Fail(absl::string_view message) {
  std::fprintf(stderr, "cluster_check: %.*s\n", static_cast<int>(message.size()), message.data());
  return 2;
}

int Run() {
  using Check = std::function<nlohmann::json(const CheckOptions&, const Reference&)>;
  const std::map<std::string, Check> checks = {{"prompts", CheckPrompts},  {"divergence", CheckDivergence},
                                               {"loss", CheckLoss},        {"pool", CheckFullPool},
                                               {"batch", CheckLargeBatch}, {"validate", CheckValidate},
                                               {"soak", CheckSoak}};
  CheckOptions options;
  options.subject.bin_dir = absl::GetFlag(FLAGS_bin_dir);
  if (options.subject.bin_dir.empty()) options.subject.bin_dir = absl::StrCat(ExecutableDir(), "/../bin");
  options.subject.model = absl::GetFlag(FLAGS_model);
  options.subject.drafter = absl::GetFlag(FLAGS_drafter);
  options.prompts_file = absl::GetFlag(FLAGS_prompts);
  options.requests = static_cast<size_t>(std::max(1, absl::GetFlag(FLAGS_requests)));
  options.tokens = static_cast<uint32_t>(std::max(1, absl::GetFlag(FLAGS_tokens)));
  options.concurrency = static_cast<size_t>(std::max(1, absl::GetFlag(FLAGS_concurrency)));
  options.tolerance = absl::GetFlag(FLAGS_tolerance);
  options.soak_steps = static_cast<uint64_t>(std::max(1, absl::GetFlag(FLAGS_soak_steps)));
  for (absl::string_view name : absl::StrSplit(absl::GetFlag(FLAGS_settings), ',')) {
    auto setting = ParseSpeculation(std::string(name));
    if (!setting.ok()) return Fail(absl::StrCat("--settings: ", setting.status().message()));
    options.settings.push_back(*std::move(setting));
  }
  const std::vector<std::string> names = absl::StrSplit(absl::GetFlag(FLAGS_checks), ',', absl::SkipEmpty());
  for (const std::string& name : names) {
    if (checks.count(name) == 0) return Fail(absl::StrCat("--checks: there is no \"", name, "\""));
  }
  if (options.subject.model.empty() || options.prompts_file.empty()) {
    return Fail("--model and --prompts are required");
  }

  ServedGroupOptions reference_options = options.subject;
  reference_options.flags = Words(absl::GetFlag(FLAGS_reference));
  reference_options.threads = absl::GetFlag(FLAGS_threads);
  if (reference_options.threads <= 0) {
    reference_options.threads = static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1U, 8U));
  }
  const auto reference_group = ServedGroup::Start(reference_options);
  if (!reference_group.ok()) return Fail(reference_group.status().ToString());
  const Reference reference(reference_group->get(), options.concurrency);

  nlohmann::json results = {{"ok", true},
                            {"tolerance", options.tolerance},
                            {"subject", absl::GetFlag(FLAGS_subject)},
                            {"reference", absl::GetFlag(FLAGS_reference)}};
  std::printf("%-22s %9s %8s %10s %11s %7s %7s %8s %8s\n", "", "tokens", "diverged", "per 10,000",
              "largest gap", "beyond", "errors", "drafted", "accepted");
  for (absl::string_view tp : absl::StrSplit(absl::GetFlag(FLAGS_tps), ',')) {
    if (!absl::SimpleAtoi(tp, &options.subject.tp)) return Fail(absl::StrCat("--tps: \"", tp, "\""));
    options.subject.flags = Words(absl::GetFlag(FLAGS_subject));
    for (const std::string& name : names) {
      nlohmann::json result = checks.at(name)(options, reference);
      for (const auto& failure : result["failures"]) {
        std::printf("  FAILED: %s\n", failure.get<std::string>().c_str());
      }
      results["ok"] = results["ok"].get<bool>() && result["ok"].get<bool>();
      result["check"] = name;
      result["tp"] = options.subject.tp;
      results["results"].push_back(std::move(result));
      // Written again behind every check: a run that is cut off leaves what it has.
      if (const std::string path = absl::GetFlag(FLAGS_json); !path.empty()) {
        std::ofstream(path) << results.dump(1) << "\n";
      }
    }
  }
  std::printf("%s\n", results["ok"].get<bool>() ? "all passed" : "FAILED");
  return results["ok"].get<bool>() ? 0 : 1;
}

}  // namespace
}  // namespace kdt::testing

int main(int argc, char** argv) {
  kdt::ParseFlags(argc, argv, "compares groups on the backend under test with the CPU backend");
  return kdt::testing::Run();
}

// What the client prints, from a server in this process with a toy group behind it.
#include <fstream>
#include <regex>
#include <sstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/process.h"
#include "coordinator/api/server.h"
#include "tests/coordinator/api/served_model.h"
#include "tests/coordinator/scheduler/fixture.h"

namespace kdt::testing {
namespace {

constexpr int kEndWithinMs = 20000;

struct Served {
  explicit Served(const SchedulerOptions& options = {}, bool forms = true, const ToyOptions& toy = {})
      : dir(*MakeTempDir("kdt-test-")),
        harness(toy, options),
        server(*ApiServer::Start(*ParseAddress("127.0.0.1:0", "listen"), GoldenServedModel(), &harness.group,
                                 harness.scheduler.get())) {
    harness.group.on_step = [this](const v1::StepRequest&) {
      return lost ? absl::UnavailableError("rank 3 is gone") : absl::OkStatus();
    };
    harness.group.forms = forms;
    harness.Start();
  }
  ~Served() {
    server.reset();
    RemoveTree(dir);
  }

  // Standard output of `kdt ARGUMENTS`.
  std::string Run(const std::string& arguments, int status = 0) {
    const std::string path = dir + "/out";
    ChildProcess::Options options;
    options.name = "kdt";
    options.argv = {"/bin/sh", "-c",
                    absl::StrCat("exec ", KDT_BIN_DIR, "/kdt --server ", server->address().ToString(), " ",
                                 arguments, " > ", path)};
    auto process = ChildProcess::Start(options);
    REQUIRE(process.ok());
    REQUIRE(process->WaitEnded(kEndWithinMs));
    CHECK(process->exit_status() == status);
    std::ostringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
  }

  const std::string dir;
  std::atomic<bool> lost{false};
  Harness harness;
  std::unique_ptr<ApiServer> server;
};

const char kGenerate[] = "generate 'one two' --max_tokens 5 --ignore_eos --temperature 0 --nosummary ";

}  // namespace

TEST_CASE("kdt generate prints log-probabilities as a table behind the text") {
  Served served;
  const std::string text = served.Run(kGenerate);
  CHECK(text.rfind("one two", 0) == 0);
  const std::string both = served.Run(absl::StrCat(kGenerate, "--logprobs 2"));
  INFO(both);
  // The text as it is without, an empty line, and a line for each token under a head.
  REQUIRE(both.rfind(text + "\n", 0) == 0);
  const std::vector<std::string> lines = absl::StrSplit(both.substr(text.size() + 1), '\n');
  REQUIRE(lines.size() == 7);
  CHECK(std::vector<std::string>(absl::StrSplit(lines[0], ' ', absl::SkipEmpty())) ==
        std::vector<std::string>{"id", "logprob", "token", "best"});
  for (size_t i = 1; i <= 5; ++i) {
    std::istringstream line(lines[i]);
    uint32_t id = 0;
    double logprob = 1;
    CHECK(line >> id >> logprob);
    CHECK(id < 1000);
    CHECK(logprob <= 0);
  }
  CHECK(lines[6].empty());
}

TEST_CASE("kdt generate prints each of several samples with its own log-probabilities") {
  Served served;
  const std::string out = served.Run(absl::StrCat(kGenerate, "--n 2 --logprobs 1"));
  INFO(out);
  const size_t first = out.find("--- sample 0\n"), second = out.find("--- sample 1\n");
  REQUIRE(first == 0);
  REQUIRE(second != std::string::npos);
  const size_t table = out.find("\nid "), other = out.find("\nid ", second);
  CHECK(table < second);
  CHECK(other != std::string::npos);
}

TEST_CASE("kdt generate's summary tells the seed that gives the same text, and what ended it") {
  Served served;
  const std::string flags = "generate 'one two' --max_tokens 6 --ignore_eos ";
  const std::string first = served.Run(flags);
  INFO(first);
  std::smatch found;
  REQUIRE(std::regex_search(first, found, std::regex("\n  seed +([0-9]+)\n")));
  CHECK(first.find("\n  ended by               max_tokens, or the context's end\n") != std::string::npos);
  const std::string again = served.Run(absl::StrCat(flags, "--seed ", found[1].str()));
  const size_t text = first.find("\n\n  tokens ");
  REQUIRE(text != std::string::npos);
  CHECK(again.substr(0, text) == first.substr(0, text));
}

TEST_CASE("a request that is refused leaves standard output empty") {
  Served served;
  CHECK(served.Run("generate 'one two' --top_p 2", 1).empty());
  CHECK(served.Run("generate ''", 2).empty());
}

TEST_CASE("a flag that a command does not take is refused by name") {
  Served served;
  const auto refused = [&](const std::string& arguments, const std::string& text) {
    INFO(arguments);
    CHECK(served.Run(absl::StrCat(arguments, " 2>", served.dir, "/err"), 2).empty());
    std::ostringstream told;
    told << std::ifstream(served.dir + "/err").rdbuf();
    CHECK(told.str() == absl::StrCat("kdt: ", text, "\n"));
  };
  refused("info --logprobs 3", "--logprobs: info does not take it; generate does");
  refused("tokenize a --logprobs 3", "--logprobs: tokenize does not take it; generate does");
  refused("bench --logprobs 3", "--logprobs: bench does not take it; generate does");
  refused("chat --message a --logprobs 3", "--logprobs: chat does not take it; generate does");
  refused("chat --message a --n 2", "--n: chat does not take it; generate, bench do");
  refused("info --temperature 0", "--temperature: info does not take it; generate, chat, bench do");
  refused("generate a --requests 3", "--requests: generate does not take it; bench does");
  refused("generate a --parse_special", "--parse_special: generate does not take it; tokenize does");
  refused("generate a --nothinking", "--thinking: generate does not take it; chat does");
  refused("bench --noecho", "--echo: bench does not take it; generate does");
  refused("bench --prompts /dev/null --prompt_tokens 5",
          "--prompt_tokens: it is for made-up prompts, not for those of --prompts");
  refused("bench --max_tokens 5 --output_tokens 6",
          "--max_tokens and --output_tokens: one of them is enough");
}

TEST_CASE("flags that would do nothing, and empty ones, are refused by name") {
  const auto refused = [](Served& served, const std::string& arguments, const std::string& text) {
    INFO(arguments);
    CHECK(served.Run(absl::StrCat(arguments, " 2>", served.dir, "/err"), 1).empty());
    std::ostringstream told;
    told << std::ifstream(served.dir + "/err").rdbuf();
    CHECK(told.str() == absl::StrCat("kdt: INVALID_ARGUMENT: ", text, "\n"));
  };
  Served plain;
  refused(plain, "generate a --stop ''", "--stop: a stop string is empty");
  refused(plain, "generate a --stop x,,y", "--stop: a stop string is empty");
  refused(plain, "chat --message a --stop ''", "--stop: a stop string is empty");
  refused(plain, "generate a --logit_bias ''", "--logit_bias: \"\" is not ID:BIAS");
  refused(plain, "generate a --budget 5 --speculation off", "--budget does nothing with --speculation=off");
  for (const std::string command : {"generate a", "chat --message a", "bench"}) {
    refused(plain, command + " --budget 5", "--budget does nothing with a server that has no drafter");
    refused(plain, command + " --speculation chain",
            "--speculation does nothing with a server that has no drafter");
  }
  plain.Run("generate a --nosummary --max_tokens 2 --speculation off");

  ToyOptions toy;
  toy.block_size = 8;
  Served drafts(SchedulerOptions(), true, toy);
  drafts.Run("generate a --nosummary --max_tokens 2 --budget 5 --speculation tree");
}

TEST_CASE("a file of prompts that is not valid JSON is told with the place of the fault") {
  Served served;
  std::ofstream(served.dir + "/prompts") << "[\"one\",\n \"two\" \"three\"]";
  served.Run(absl::StrCat("bench --prompts ", served.dir, "/prompts 2>", served.dir, "/err"), 1);
  std::ostringstream told;
  told << std::ifstream(served.dir + "/err").rdbuf();
  CHECK(told.str() == absl::StrCat("kdt: INVALID_ARGUMENT: --prompts: ", served.dir,
                                   "/prompts: not valid JSON: line 2, column 8: expected ',' or ']', found "
                                   "'\"'\n"));
}

TEST_CASE("every flag is taken by the commands that it is for") {
  Served served;
  // All that bench, chat and tokenize take beside what other tests give.
  CHECK(served
            .Run("bench --requests 1 --concurrency 1 --warmup 0 --prompt_tokens 4 --output_tokens 3 --n 2 "
                 "--json")
            .rfind("{", 0) == 0);
  const std::string request =
      " --temperature 0.5 --top_p 0.9 --top_k 9 --min_p 0.01 --repetition_penalty 1.1 --frequency_penalty "
      "0.1 "
      "--presence_penalty 0.1 --logit_bias 5:1 --seed 3 --min_tokens 1 --stop zz --ignore_eos --include_stop "
      "--priority 1 --speculation off ";
  served.Run(absl::StrCat("generate a --noecho --nosummary --max_tokens 2", request));
  served.Run(absl::StrCat("bench --requests 1 --warmup 0 --max_tokens 2", request));
  CHECK_FALSE(served.Run("tokenize a --parse_special").empty());
}

TEST_CASE("kdt info says nothing of what the ranks have loaded before they were a group") {
  SchedulerOptions options;
  options.rejoin = true;
  Served served(options, false);
  const std::string waits = served.Run("info", 1);
  INFO(waits);
  CHECK(waits.find("\nNOT serving, epoch 0, 0 running, 0 waiting\ntoy\n\n") != std::string::npos);
  CHECK(waits.find("drafter") == std::string::npos);
  CHECK(waits.find("checkpoint") == std::string::npos);
  served.harness.group.forms = true;
  for (int i = 0; i < 1000 && served.harness.group.epoch() == 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  const std::string serves = served.Run("info");
  CHECK(serves.find(", checkpoint ") != std::string::npos);
  CHECK(serves.find("\nno drafter\n") != std::string::npos);
}

TEST_CASE("kdt info tells samples that a lost group holds") {
  SchedulerOptions options;
  options.rejoin = true;
  Served served(options);
  served.harness.group.step_time = std::chrono::milliseconds(2);
  CHECK(served.Run("info").find("\nserving, epoch 1, 0 running, 0 waiting\n\n") != std::string::npos);
  const auto client = served.harness.Submit(Spec(Prompt(20), 300));
  REQUIRE(client->WaitTokens(0, 3));
  served.harness.group.forms = false;
  served.lost = true;
  for (int i = 0; i < 2000 && served.harness.scheduler->running() > 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  const std::string held = served.Run("info", 1);
  INFO(held);
  CHECK(held.find("\nNOT serving, epoch 1, 0 running, 1 held, 0 waiting\ntoy\n\n") != std::string::npos);
  served.lost = false;
  served.harness.group.forms = true;
  CHECK(client->Wait().ok());
}

}  // namespace kdt::testing

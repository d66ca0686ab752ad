// What kdt-launch makes of its flags: what it hands on to whom, and what it refuses.
#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "common/process.h"
#include "tests/support/catch.h"

namespace kdt::testing {
namespace {

constexpr int kStopMs = 30000;
const std::string kModel = std::string(KDT_GOLDENS_DIR) + "/model";

struct Folder {
  Folder() : path(*MakeTempDir("kdt-test-")) {}
  ~Folder() { RemoveTree(path); }
  std::string Log() const {
    std::ifstream file(path + "/log");
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }
  const std::string path;
};

}  // namespace

TEST_CASE("each rank gets its GPU, in turn where there are fewer, and the flags behind the dashes") {
  const Folder folder;
  // A worker that writes down what it was started with.
  std::filesystem::copy_file(std::string(KDT_BIN_DIR) + "/kdt-launch", folder.path + "/kdt-launch");
  std::ofstream(folder.path + "/kdt-worker")
      << "#!/bin/sh\necho \"$@\" >>" << folder.path << "/started\nexec sleep 100\n";
  std::filesystem::permissions(folder.path + "/kdt-worker", std::filesystem::perms::owner_all);
  const auto started_with = [&](const std::vector<std::string>& flags) {
    std::filesystem::remove(folder.path + "/started");
    ChildProcess::Options process;
    process.name = "kdt-launch";
    process.argv = {folder.path + "/kdt-launch",   "--model=" + folder.path, "--role=workers", "--tp=3",
                    "--socket_dir=" + folder.path, "--drain_timeout_s=0"};
    process.argv.insert(process.argv.end(), flags.begin(), flags.end());
    process.stderr_path = folder.path + "/log";
    auto launcher = ChildProcess::Start(process);
    REQUIRE(launcher.ok());
    std::vector<std::string> lines;
    for (int i = 0; i < 4000 && lines.size() < 3; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      lines.clear();
      std::ifstream file(folder.path + "/started");
      for (std::string line; std::getline(file, line);) lines.push_back(line + " ");
    }
    REQUIRE(lines.size() == 3);
    std::sort(lines.begin(), lines.end());  // --rank comes first
    launcher->Signal(SIGTERM);
    CHECK(launcher->WaitEnded(kStopMs));
    return lines;
  };
  const auto has = [](const std::string& line, const std::string& flag) {
    return line.find(" " + flag + " ") != std::string::npos;
  };
  const auto in_turn = started_with({"--backend=cuda", "--devices=4,2", "--", "--max_tree_nodes=64"});
  CHECK(has(in_turn[0], "--device=4"));
  CHECK(has(in_turn[1], "--device=2"));
  CHECK(has(in_turn[2], "--device=4"));
  CHECK(has(in_turn[2], "--max_tree_nodes=64"));
  const auto own = started_with({"--backend=cuda"});
  CHECK(has(own[0], "--device=0"));
  CHECK(has(own[2], "--device=2"));
  CHECK(own[0].find("--threads") == std::string::npos);
  const auto cpu = started_with({});
  CHECK(cpu[0].find("--device") == std::string::npos);
  CHECK(cpu[0].find("--threads=") != std::string::npos);
}

TEST_CASE("the flags of workers and coordinator are handed on, those that are not set are not") {
  const Folder folder;
  std::filesystem::copy_file(std::string(KDT_BIN_DIR) + "/kdt-launch", folder.path + "/kdt-launch");
  for (const std::string program : {"kdt-worker", "kdt-coordinator"}) {
    std::ofstream(folder.path + "/" + program)
        << "#!/bin/sh\necho \"$@\" >>" << folder.path << "/flags-of-" << program << "\nexec sleep 100\n";
    std::filesystem::permissions(folder.path + "/" + program, std::filesystem::perms::owner_all);
  }
  ChildProcess::Options process;
  process.name = "kdt-launch";
  process.argv = {folder.path + "/kdt-launch",
                  "--model=" + folder.path,
                  "--tp=1",
                  "--threads=2",
                  "--drafter=" + folder.path,
                  "--draft_rope_factor=0.5",
                  "--kv_slots=512",
                  "--metrics_host=127.0.0.2",
                  "--listen=127.0.0.1:0",
                  "--budget=7",
                  "--step_timeout_ms=1500",
                  "--drain_timeout_s=0"};
  process.stderr_path = folder.path + "/log";
  auto launcher = ChildProcess::Start(process);
  REQUIRE(launcher.ok());
  const auto flags_of = [&](const std::string& program) {
    std::string line;
    for (int i = 0; i < 4000 && line.empty(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      std::ifstream file(folder.path + "/flags-of-" + program);
      std::getline(file, line);
    }
    return " " + line + " ";
  };
  const std::string worker = flags_of("kdt-worker"), coordinator = flags_of("kdt-coordinator");
  launcher->Signal(SIGTERM);
  CHECK(launcher->WaitEnded(kStopMs));
  INFO(worker << "\n" << coordinator);
  const auto has = [](const std::string& line, const std::string& flag) {
    return line.find(" --" + flag + " ") != std::string::npos;
  };
  for (const std::string& line : {worker, coordinator}) {
    CHECK(has(line, "model=" + folder.path));
    CHECK(has(line, "drafter=" + folder.path));
    CHECK(has(line, "metrics_host=127.0.0.2"));
    CHECK(has(line, "log_level=info"));
  }
  CHECK(has(worker, "threads=2"));
  CHECK(has(worker, "draft_rope_factor=0.5"));
  CHECK(has(worker, "kv_slots=512"));
  CHECK(has(coordinator, "listen=127.0.0.1:0"));
  CHECK(has(coordinator, "budget=7"));
  CHECK(has(coordinator, "step_timeout_ms=1500"));
  for (const std::string flag : {"kv_bytes", "max_rows", "tree", "max_waiting", "tls_cert"}) {
    CHECK((worker + coordinator).find("--" + flag) == std::string::npos);
  }
}

TEST_CASE("a worker that ends before it listens is not started again and again") {
  for (const std::string flag : {"--strict", "--no_such_flag"}) {
    const Folder folder;
    ChildProcess::Options process;
    process.name = "kdt-launch";
    process.argv = {std::string(KDT_BIN_DIR) + "/kdt-launch",
                    "--model=" + kModel,
                    "--role=workers",
                    "--tp=2",
                    "--socket_dir=" + folder.path,
                    "--on_loss=restart",
                    "--",
                    flag};
    process.stderr_path = folder.path + "/log";
    auto launcher = ChildProcess::Start(process);
    REQUIRE(launcher.ok());
    CHECK(launcher->WaitEnded(kStopMs));
    CHECK(launcher->exit_status() == 1);
    INFO(folder.Log());
    CHECK(folder.Log().find(" exited with status ") != std::string::npos);
    CHECK(folder.Log().find(" before it listened") != std::string::npos);
    CHECK(folder.Log().find("; ending the group") != std::string::npos);
    if (flag == "--strict") {
      CHECK(folder.Log().find("before it listened: --strict does nothing without --backend=cuda; ending") !=
            std::string::npos);
    }
    CHECK(folder.Log().find("restarting") == std::string::npos);
  }
}

TEST_CASE("contradictory flags are refused") {
  const std::string bin = KDT_BIN_DIR;
  for (const std::vector<std::string>& flags : std::vector<std::vector<std::string>>{
           {"--role=worker"},
           {"--devices=0"},
           {"--draft_window=64"},
           {"--budget=8"},
           {"--tree=chain"},
           {"--record_trees=/dev/null"},
           {"--max_restarts=3"},
           {"--role=workers", "--socket_dir=/tmp", "--budget=8"},
           {"--role=workers", "--socket_dir=/tmp", "--listen=127.0.0.1:0"},
           {"--backend=cuda", "--devices=0,x"},
           {"--role=workers"},
           {"--socket_dir=/tmp"},
           {"--role=workers", "--socket_dir=/tmp", "--worker_listen=127.0.0.1:7000"},
           {"--role=workers", "--socket_dir=/no/such/folder"},
           {"--role=workers", "--worker_listen=127.0.0.1:0"},
           {"--role=workers", "--worker_listen=127.0.0.1:65530"},
           {"--role=workers", "--worker_listen=127.0.0.1:7000", "--ranks_per_node=3"},
           {"--role=workers", "--worker_listen=127.0.0.1:7000", "--ranks_per_node=4", "--node_index=2"}}) {
    ChildProcess::Options process;
    process.name = "kdt-launch";
    process.argv = {bin + "/kdt-launch", "--model=" + kModel, "--tp=8"};
    process.argv.insert(process.argv.end(), flags.begin(), flags.end());
    process.discard_stderr = true;
    auto launcher = ChildProcess::Start(process);
    REQUIRE(launcher.ok());
    INFO(flags.back());
    CHECK(launcher->WaitEnded(kStopMs));
    CHECK(launcher->exit_status() == 2);
  }
}

}  // namespace kdt::testing

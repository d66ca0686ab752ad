// Slots: the ledger against real tables, the prefix cache, eviction, preemption.
#include <random>

#include "coordinator/scheduler/prefix_cache.h"
#include "coordinator/scheduler/slot_ledger.h"
#include "tests/coordinator/scheduler/fixture.h"

namespace kdt::testing {

TEST_CASE("the ledger counts shared slots once, as reference counts do") {
  std::mt19937 random(7);
  constexpr uint64_t kSlots = 100000;
  SlotLedger ledger;
  ledger.Reset(kSlots);
  std::map<uint64_t, std::vector<uint32_t>> tables;
  std::map<uint32_t, int> references;
  uint32_t next_slot = 0;
  uint64_t next_id = 1;
  for (int round = 0; round < 4000; ++round) {
    const auto pick = [&] { return std::next(tables.begin(), static_cast<long>(random() % tables.size())); };
    switch (tables.empty() ? 0 : random() % 5) {
      case 0:
        ledger.Create(next_id);
        tables[next_id++];
        break;
      case 1:
      case 2: {
        const auto entry = pick();
        const uint32_t rows = 1 + random() % 9;
        ledger.Append(entry->first, rows);
        for (uint32_t i = 0; i < rows; ++i) {
          references[next_slot] = 1;
          entry->second.push_back(next_slot++);
        }
        break;
      }
      case 3: {
        const auto entry = pick();
        if (entry->second.empty()) break;
        const auto length = static_cast<uint32_t>(1 + random() % entry->second.size());
        ledger.Fork(next_id, entry->first, length);
        auto& table = tables[next_id++];
        table.assign(entry->second.begin(), entry->second.begin() + length);
        for (const uint32_t slot : table) ++references[slot];
        break;
      }
      case 4: {
        const auto entry = pick();
        for (const uint32_t slot : entry->second) {
          if (--references[slot] == 0) references.erase(slot);
        }
        ledger.Free(entry->first);
        tables.erase(entry);
        break;
      }
    }
    REQUIRE(ledger.used() == references.size());
    REQUIRE(ledger.sequences() == tables.size());
  }
  std::vector<uint64_t> ids;
  for (const auto& [id, table] : tables) ids.push_back(id);
  CHECK(ledger.HeldBy(ids) == ledger.used());
}

TEST_CASE("the prefix cache finds the longest prefix and forgets the least recently used") {
  PrefixCache cache;
  CHECK(cache.Insert(1, {1, 2, 3, 4}).empty());
  CHECK(cache.Insert(2, {1, 2, 9}).empty());
  const std::vector<uint32_t> prompt = {1, 2, 3, 7};
  CHECK(cache.Find(prompt).sequence_id == 1);
  CHECK(cache.Find(prompt).length == 3);
  CHECK(cache.Insert(3, {1, 2, 3, 4, 5}) == std::vector<uint64_t>{1});  // it covers the first
  CHECK(cache.Evict() == 2);
  CHECK(cache.Evict() == 3);
  CHECK_FALSE(cache.Evict().has_value());
  CHECK(cache.Find(prompt).length == 0);
}

TEST_CASE("a prompt that begins like an earlier one starts from its K/V") {
  Harness harness;
  harness.Start();
  const RequestSpec first = Spec(Prompt(60), 10);
  const auto client = harness.Submit(first);
  REQUIRE(client->Wait().ok());
  CHECK(client->sample().complete->usage().cached_prompt_tokens() == 0);

  RequestSpec next = first;  // the conversation goes on
  const auto answer = client->sample().tokens;
  next.prompt.insert(next.prompt.end(), answer.begin(), answer.end());
  for (uint32_t i = 0; i < 15; ++i) next.prompt.push_back(900 + i);
  next.sampling.set_prompt_length(static_cast<uint32_t>(next.prompt.size()));
  const auto again = harness.Submit(next);
  REQUIRE(again->Wait().ok());
  // All but the answer's last token, which never went through the model.
  CHECK(again->sample().complete->usage().cached_prompt_tokens() == 60 + 9);
  CHECK(again->sample().tokens == harness.Expected(next, 10));
  CHECK(harness.group.rank().prefilled_tokens() == 60 + 1 + 15);
  CHECK(harness.group.step_error().empty());
}

TEST_CASE("cached sequences make room for new ones") {
  ToyOptions toy;
  toy.slots = 200;
  toy.max_sequences = 6;
  Harness harness(toy);
  harness.Start();
  for (uint32_t i = 0; i < 12; ++i) {
    const RequestSpec spec = Spec(Prompt(50, i), 12);
    const auto client = harness.Submit(spec);
    REQUIRE(client->Wait().ok());
    CHECK(client->sample().tokens == harness.Expected(spec, 12));
  }
  CHECK(harness.group.step_error().empty());
}

TEST_CASE("more answers than slots: juniors are preempted, every token comes once and no step is refused") {
  ToyOptions toy;
  toy.slots = 160;
  toy.max_context = 160;
  for (const uint32_t block : {0u, 8u}) {
    toy.block_size = block;
    SchedulerOptions options;
    options.prefill_chunk = 16;
    options.speculation.budget = 12;
    Harness harness(toy, options);
    harness.group.Form();
    std::vector<RequestSpec> specs;
    std::vector<std::shared_ptr<Collector>> clients;
    for (uint32_t i = 0; i < 8; ++i) {
      specs.push_back(Spec(Prompt(20, i), 100));
      specs.back().n = i == 3 ? 2 : 1;
      specs.back().prompt_logprobs = i == 5 ? 1 : 0;
      specs.back().sampling.set_logprobs(1);
      clients.push_back(harness.Submit(specs.back()));
    }
    harness.scheduler->Start();
    for (uint32_t i = 0; i < 8; ++i) {
      REQUIRE(clients[i]->Wait().ok());
      for (uint32_t index = 0; index < specs[i].n; ++index) {
        const auto sample = clients[i]->sample(index);
        CHECK(sample.tokens == harness.Expected(specs[i], 100, index));
        CHECK(sample.logprobs.size() == 100);
        CHECK(sample.complete->prompt_logprobs_size() == (i == 5 ? 19 : 0));
      }
    }
    CHECK(harness.group.step_error().empty());
    CHECK_FALSE(harness.lost);
    CHECK(harness.group.rank().prefilled_tokens() > 8 * 20 + 2);  // somebody was preempted
  }
}

}  // namespace kdt::testing

#include "tests/gpu/divergence.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "common/rng.h"

namespace kdt::testing {
namespace {

std::optional<double> Logprob(const v1::PositionLogprobs& position, uint32_t token) {
  if (position.token().token_id() == token) return position.token().logprob();
  for (const v1::TokenLogprob& top : position.top()) {
    if (top.token_id() == token) return top.logprob();
  }
  return std::nullopt;
}

Divergence Measure(const PlannedRequest& planned, const Stream& reference, size_t index, uint32_t got,
                   const Probe& probe) {
  Divergence divergence;
  divergence.kind = planned.kind;
  divergence.index = index;
  divergence.expected = reference.tokens[index];
  divergence.got = got;
  divergence.gap = std::numeric_limits<double>::quiet_NaN();
  if (index >= reference.logprobs.size()) return divergence;
  const v1::PositionLogprobs& position = reference.logprobs[index];
  const std::vector<uint32_t> generated(reference.tokens.begin(),
                                        reference.tokens.begin() + static_cast<std::ptrdiff_t>(index));
  std::optional<double> other = Logprob(position, got);
  if (!other.has_value() && probe) {
    const auto& ids = planned.request.token_ids().ids();
    std::vector<uint32_t> prefix(ids.begin(), ids.end());
    prefix.insert(prefix.end(), generated.begin(), generated.end());
    other = probe(prefix, got);
  }
  if (!other.has_value()) return divergence;
  divergence.gap = Score(planned.request, generated, divergence.expected, position.token().logprob()) -
                   Score(planned.request, generated, got, *other);
  return divergence;
}

}  // namespace

double Comparison::LargestGap() const {
  double largest = 0;
  for (const Divergence& divergence : divergences) {
    largest = std::isfinite(divergence.gap) ? std::max(largest, divergence.gap)
                                            : std::numeric_limits<double>::infinity();
  }
  return largest;
}

size_t Comparison::Beyond(double tolerance) const {
  return static_cast<size_t>(std::count_if(divergences.begin(), divergences.end(),
                                           [&](const Divergence& d) { return !(d.gap < tolerance); }));
}

double Score(const v1::GenerateRequest& request, const std::vector<uint32_t>& generated, uint32_t token,
             double logprob) {
  const v1::SamplingParams& sampling = request.sampling();
  const auto times = static_cast<double>(std::count(generated.begin(), generated.end(), token));
  double score = logprob - static_cast<double>(sampling.frequency_penalty()) * times;
  if (times > 0) score -= static_cast<double>(sampling.presence_penalty());
  const double temperature = sampling.temperature();
  if (temperature == 0) return score;
  const uint64_t position = static_cast<uint64_t>(request.token_ids().ids_size()) + generated.size();
  return score + temperature * static_cast<double>(GumbelNoise(sampling.seed(), position, token));
}

void Compare(const std::vector<PlannedRequest>& requests, const std::vector<Stream>& reference,
             const std::vector<Stream>& subject, const Probe& probe, Comparison* out) {
  for (size_t i = 0; i < requests.size(); ++i) {
    const Stream& expected = reference[i];
    const Stream& got = subject[i];
    ++out->requests;
    out->rounds += got.rounds;
    out->drafted += got.drafted;
    out->accepted += got.accepted;
    if (!got.error.empty()) {
      out->errors.push_back(absl::StrCat("request ", i, ": ", got.error));
      continue;
    }
    if (got.tokens.size() != expected.tokens.size()) {
      out->errors.push_back(absl::StrCat("request ", i, ": ", got.tokens.size(), " tokens instead of ",
                                         expected.tokens.size()));
    }
    const size_t length = std::min(got.tokens.size(), expected.tokens.size());
    for (size_t t = 0; t < length; ++t) {
      ++out->tokens;
      if (got.tokens[t] != expected.tokens[t]) {
        Divergence divergence = Measure(requests[i], expected, t, got.tokens[t], probe);
        divergence.request = i;
        out->divergences.push_back(divergence);
        break;
      }
      if (t >= got.logprobs.size() || t >= expected.logprobs.size()) continue;
      out->logprob_errors.push_back(std::abs(static_cast<double>(got.logprobs[t].token().logprob()) -
                                             static_cast<double>(expected.logprobs[t].token().logprob())));
    }
  }
}

Probe ProbeServer(v1::Generation::Stub& stub) {
  return [&stub](const std::vector<uint32_t>& prefix, uint32_t token) -> std::optional<double> {
    v1::GenerateRequest request;
    for (const uint32_t id : prefix) request.mutable_token_ids()->add_ids(id);
    request.mutable_token_ids()->add_ids(token);
    request.mutable_stop()->set_max_tokens(1);
    request.mutable_stop()->set_ignore_eos(true);
    request.mutable_output()->set_prompt_logprobs(1);
    grpc::ClientContext context;
    auto reader = stub.Generate(&context, request);
    v1::GenerateResponse response;
    std::optional<double> logprob;
    while (reader->Read(&response)) {
      if (!response.has_complete() || response.complete().prompt_logprobs().empty()) continue;
      const v1::PositionLogprobs& last = *response.complete().prompt_logprobs().rbegin();
      if (last.token().token_id() == token) logprob = last.token().logprob();
    }
    return reader->Finish().ok() ? logprob : std::nullopt;
  };
}

}  // namespace kdt::testing

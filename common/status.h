// Error plumbing: every path that input can reach returns absl::Status; impossible states abort with a
// message.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define KDT_CONCAT_INNER(a, b) a##b
#define KDT_CONCAT(a, b) KDT_CONCAT_INNER(a, b)

#define KDT_RETURN_IF_ERROR(expr)            \
  do {                                       \
    ::absl::Status kdt_status = (expr);      \
    if (!kdt_status.ok()) return kdt_status; \
  } while (false)

// KDT_ASSIGN_OR_RETURN(auto x, MakeX());
#define KDT_ASSIGN_OR_RETURN(lhs, expr) KDT_ASSIGN_OR_RETURN_IMPL(KDT_CONCAT(kdt_or_, __LINE__), lhs, expr)
#define KDT_ASSIGN_OR_RETURN_IMPL(tmp, lhs, expr) \
  auto tmp = (expr);                              \
  if (!tmp.ok()) return std::move(tmp).status();  \
  lhs = std::move(tmp).value()

// For states that no input can cause: a broken invariant in our own code. Prints the text and aborts.
#define KDT_CHECK(cond)                                                             \
  do {                                                                              \
    if (!(cond)) {                                                                  \
      std::fprintf(stderr, "%s:%d: check failed: %s\n", __FILE__, __LINE__, #cond); \
      std::abort();                                                                 \
    }                                                                               \
  } while (false)

// Linked into a test program, this makes the ops use one older instruction set instead of the machine's best.
#include "hwy/targets.h"

namespace {

// Where the processor lacks the instruction set, the tests run on what it has.
const bool limited = [] {
  if ((hwy::SupportedTargets() & KDT_TEST_TARGET) != 0) hwy::SetSupportedTargetsForTest(KDT_TEST_TARGET);
  return true;
}();

}  // namespace

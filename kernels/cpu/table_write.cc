#include "kdt/kernels/table_write.h"

#include "kernels/cpu/ops.h"

namespace kdt::kernels::cpu {

void TableWrite(Context& /*context*/, const TableWriteArgs& args) {
  for (int64_t i = 0; i < args.count; ++i) {
    if (args.index[i] >= 0) args.table[args.index[i]] = args.value[i];
  }
}

}  // namespace kdt::kernels::cpu

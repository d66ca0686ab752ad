#ifdef KDT_CATCH2_V2
#define CATCH_CONFIG_MAIN
#endif
#include "tests/support/catch.h"

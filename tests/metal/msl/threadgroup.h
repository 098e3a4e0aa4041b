// Threadgroup variables. The text edit in edit.py turns
//   threadgroup float tile[4][32];   into   MSL_THREADGROUP(float, tile, [4][32]);
// a reference to memory that all threads of the threadgroup share and the runtime watches.
#pragma once
#include "runtime.h"

// `key` is one static a variable and template instantiation: its address names the allocation.
#define MSL_THREADGROUP(TYPE, NAME, DIMENSIONS)                                                \
  typedef TYPE msl_type_##NAME DIMENSIONS;                                                     \
  static char msl_key_##NAME;                                                                  \
  threadgroup msl_type_##NAME& NAME = *(threadgroup msl_type_##NAME*)msl_threadgroup_variable( \
      msl_place::here(), &msl_key_##NAME, #NAME, sizeof(msl_type_##NAME),                      \
      alignof(msl_type_##NAME) < 16 ? 16 : alignof(msl_type_##NAME))

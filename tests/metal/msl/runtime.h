// The door between a kernel and the runtime that executes it (../runtime/): every function a shim calls.
// Knows nothing of Metal's names.
#pragma once

// Where a statement stands in the source; as a default argument it is the caller's place.
struct msl_place {
  const char* file;
  unsigned line;
  static constexpr msl_place here(const char* file = __builtin_FILE(), unsigned line = __builtin_LINE()) {
    return {file, line};
  }
};

// What the lanes of a simdgroup hand each other: one slot a lane, and which lanes took part.
struct msl_exchange_result {
  unsigned lanes;    // bit i: lane i left an operand
  const char* slots; // 32 slots of MSL_SLOT bytes
};
#define MSL_SLOT 64

// All threads that take part must come to the same call of it, so the optimiser may not make two calls of one
// or one of two.
#define MSL_TOGETHER __attribute__((convergent, nomerge))

extern "C" {
unsigned msl_lane();
MSL_TOGETHER void msl_threadgroup_barrier(msl_place at, int flags);
MSL_TOGETHER void msl_simdgroup_barrier(msl_place at, int flags);
// `call` tells apart calls that stand in one line, such as a helper's line reached from two places.
MSL_TOGETHER msl_exchange_result msl_exchange(msl_place at, const void* call, const char* what,
                                              const void* operand, unsigned size);
void msl_fail(msl_place at, const char* what);
void* msl_threadgroup_variable(msl_place at, const void* key, const char* name, unsigned size,
                               unsigned align);
void msl_atomic_access(msl_place at, void* address, unsigned size, bool reads);
}

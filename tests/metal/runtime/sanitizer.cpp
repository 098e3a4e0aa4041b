// The functions that clang's instrumentation calls: thread sanitizer's (every load and store),
// undefined-behaviour sanitizer's (arithmetic and array indices) and coverage's (every basic block). No
// sanitizer runtime is linked.
#include "state.h"

#define CALLER ((u64)__builtin_return_address(0))

#define MSL_TSAN(N)                                                                        \
  extern "C" void __tsan_read##N(void* p) { check_access(p, N, false, CALLER); }           \
  extern "C" void __tsan_write##N(void* p) { check_access(p, N, true, CALLER); }           \
  extern "C" void __tsan_unaligned_read##N(void* p) { check_access(p, N, false, CALLER); } \
  extern "C" void __tsan_unaligned_write##N(void* p) { check_access(p, N, true, CALLER); }
MSL_TSAN(1)
MSL_TSAN(2)
MSL_TSAN(4)
MSL_TSAN(8)
MSL_TSAN(16)

extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void* __tsan_memcpy(void* to, const void* from, size_t n) {
  check_access(from, (u32)n, false, CALLER);
  check_access(to, (u32)n, true, CALLER);
  return memcpy(to, from, n);
}
extern "C" void* __tsan_memmove(void* to, const void* from, size_t n) {
  check_access(from, (u32)n, false, CALLER);
  check_access(to, (u32)n, true, CALLER);
  return memmove(to, from, n);
}
extern "C" void* __tsan_memset(void* to, int value, size_t n) {
  check_access(to, (u32)n, true, CALLER);
  return memset(to, value, n);
}

// A loop that never ends runs out of blocks.
extern "C" void __sanitizer_cov_trace_pc() {
  if (!run.current) return;
  if (++run.totals.blocks > run.launch->block_limit)
    fail(current_at_instruction(CALLER), "still running after %lu basic blocks: an endless loop?",
         run.launch->block_limit);
}

// edit.py puts a call of this before every load and store.
extern "C" void msl_check_alignment(const void* p, u64 alignment) {
  if (run.current && (u64)p % alignment)
    fail(current_at_instruction(CALLER),
         "misaligned access: an address %lu bytes above a multiple of %lu, which the type asks for",
         (u64)p % alignment, alignment);
}

// ---- undefined behaviour: each handler gets the source location and type descriptors, and does not return,
// so that no optimisation can reason from the misstep that would follow

struct Type {
  u16 kind, info; // kind 0: integer; info: bit 0 signed, above it log2 of the width
  char name[];
};
struct SourceLocation {
  const char* file;
  u32 line, column;
};
struct OverflowData {
  SourceLocation at;
  const Type* type;
};
struct IndexData {
  SourceLocation at;
  const Type *array, *index;
};
struct ShiftData {
  SourceLocation at;
  const Type *left, *right;
};

static Location at(const SourceLocation& source) { return current_at({source.file, source.line}); }

// Values of up to 64 bits come as a zero-extended number.
static long value(const Type* type, u64 bits) {
  u32 width = 1u << (type->info >> 1);
  if (!(type->info & 1) || width >= 64) return (long)bits;
  return (long)(bits << (64 - width)) >> (64 - width);
}

#define MSL_OVERFLOW(NAME, SIGN)                                                                \
  extern "C" void __ubsan_handle_##NAME##_overflow_abort(const OverflowData* d, u64 a, u64 b) { \
    fail(at(d->at), "integer overflow: %ld " SIGN " %ld does not fit %s", value(d->type, a),    \
         value(d->type, b), d->type->name);                                                     \
  }
MSL_OVERFLOW(add, "+")
MSL_OVERFLOW(sub, "-")
MSL_OVERFLOW(mul, "*")
extern "C" void __ubsan_handle_negate_overflow_abort(const OverflowData* d, u64 a) {
  fail(at(d->at), "integer overflow: the negative of %ld does not fit %s", value(d->type, a), d->type->name);
}
extern "C" void __ubsan_handle_divrem_overflow_abort(const OverflowData* d, u64 a, u64 b) {
  fail(at(d->at), "division of %ld by %ld", value(d->type, a), value(d->type, b));
}
extern "C" void __ubsan_handle_shift_out_of_bounds_abort(const ShiftData* d, u64, u64 count) {
  fail(at(d->at), "shift of %s by %ld bits", d->left->name, value(d->right, count));
}
extern "C" void __ubsan_handle_out_of_bounds_abort(const IndexData* d, u64 index) {
  fail(at(d->at), "index %ld is out of the bounds of %s", value(d->index, index), d->array->name);
}
extern "C" void __ubsan_handle_local_out_of_bounds_abort() {
  fail(current_at_instruction(CALLER), "access out of the bounds of a local array or constant table");
}
extern "C" void __ubsan_handle_float_cast_overflow_abort(const SourceLocation* d, u64) {
  fail(at(*d), "conversion of a float that does not fit the integer type");
}
extern "C" void __ubsan_handle_invalid_builtin_abort(const SourceLocation* d) {
  fail(at(*d), "count of leading or trailing zeros of 0");
}
extern "C" void __ubsan_handle_builtin_unreachable(const SourceLocation* d) {
  fail(at(*d), "execution reached the end of a function that must return a value");
}
extern "C" void __ubsan_handle_missing_return(const SourceLocation* d) {
  fail(at(*d), "execution reached the end of a function that must return a value");
}

// The few functions of libc that the runtime uses; they are found in the Python process that loads it.
// No system headers: the compiler comes from a package and brings none along.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long u64;
typedef unsigned long size_t;

extern "C" {
void* mmap(void*, size_t, int protection, int flags, int, long);
int munmap(void*, size_t);
int mprotect(void*, size_t, int protection);
void* memcpy(void*, const void*, size_t);
void* memmove(void*, const void*, size_t);
void* memset(void*, int, size_t);
void* realloc(void*, size_t);
void free(void*);
int snprintf(char*, size_t, const char*, ...);
int vsnprintf(char*, size_t, const char*, __builtin_va_list);
}

enum { NO_ACCESS = 0, READ_WRITE = 3 };

// Zeroed pages that take memory only once touched (Linux: private, anonymous, no reserve).
inline u8* map_pages(size_t size, int protection = READ_WRITE) {
  return (u8*)mmap(nullptr, size, protection, 0x4022, -1, 0);
}

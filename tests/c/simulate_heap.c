/* Counts the host memory that the program holds: the linker sends all of its own allocations here
 * (--wrap). */
#include <stdatomic.h>
#include <stdlib.h>

#include "simulate.h"

static atomic_llong live_count;

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *block, size_t size);
void *__real_aligned_alloc(size_t alignment, size_t size);
void __real_free(void *block);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *block, size_t size);
void *__wrap_aligned_alloc(size_t alignment, size_t size);
void __wrap_free(void *block);

static void *counted(void *block) {
  if (block) atomic_fetch_add(&live_count, 1);
  return block;
}

void *__wrap_malloc(size_t size) { return counted(__real_malloc(size)); }

void *__wrap_calloc(size_t count, size_t size) { return counted(__real_calloc(count, size)); }

void *__wrap_realloc(void *block, size_t size) {
  return block ? __real_realloc(block, size) : counted(__real_malloc(size));
}

void *__wrap_aligned_alloc(size_t alignment, size_t size) {
  return counted(__real_aligned_alloc(alignment, size));
}

void __wrap_free(void *block) {
  if (block) atomic_fetch_sub(&live_count, 1);
  __real_free(block);
}

int64_t heap_live_count(void) { return atomic_load(&live_count); }

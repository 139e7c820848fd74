/* The runner of the tests of the core: all of them, or those named on the command line. The last
 * line is the count; the exit status is 0 if nothing failed. */
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

static atomic_int passed_count;
static atomic_int failed_count;
static _Thread_local char case_text[200];

void check_case(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(case_text, sizeof case_text, format, arguments);
  va_end(arguments);
}

static bool note(bool is_true) {
  atomic_fetch_add(is_true ? &passed_count : &failed_count, 1);
  return is_true;
}

void check_true(bool is_true, const char *file, int line, const char *text) {
  if (!note(is_true)) fprintf(stderr, "%s:%d: [%s] not true: %s\n", file, line, case_text, text);
}

void check_equal(int64_t actual, int64_t expected, const char *file, int line, const char *text) {
  if (note(actual == expected)) return;
  fprintf(stderr, "%s:%d: [%s] %s is %lld, expected %lld\n", file, line, case_text, text,
          (long long)actual, (long long)expected);
}

void check_text(const char *actual, const char *expected, const char *file, int line) {
  if (note(strcmp(actual, expected) == 0)) return;
  fprintf(stderr, "%s:%d: [%s] \"%s\", expected \"%s\"\n", file, line, case_text, actual, expected);
}

void check_status(fdp_status status, fdp_status expected, const char *message, const char *file,
                  int line) {
  const char *actual = status == FDP_OK ? "" : fdp_last_message();
  bool same = status == expected;
  if (status != FDP_OK) same = same && *actual && (!message || strcmp(actual, message) == 0);
  if (note(same)) return;
  fprintf(stderr, "%s:%d: [%s] %s \"%s\", expected %s \"%s\"\n", file, line, case_text,
          fdp_status_name(status), actual, fdp_status_name(expected), message ? message : "...");
}

/* --- allocations: the linker sends the core's calls here (--wrap) --- */

static _Thread_local int64_t calls_until_failure;
static _Thread_local bool has_failed;
static _Thread_local bool is_spared;
static _Thread_local int64_t allocation_count;

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_aligned_alloc(size_t alignment, size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_aligned_alloc(size_t alignment, size_t size);

void check_spare_allocations(bool is_on) { is_spared = is_on; }

static bool fails(void) {
  if (is_spared) return false;
  allocation_count += 1;
  if (calls_until_failure == 0 || --calls_until_failure > 0) return false;
  has_failed = true;
  return true;
}

void *__wrap_malloc(size_t size) { return fails() ? NULL : __real_malloc(size); }

void *__wrap_calloc(size_t count, size_t size) {
  return fails() ? NULL : __real_calloc(count, size);
}

void *__wrap_aligned_alloc(size_t alignment, size_t size) {
  return fails() ? NULL : __real_aligned_alloc(alignment, size);
}

void check_fail_allocation(int64_t nth_call) {
  calls_until_failure = nth_call;
  has_failed = false;
}

bool check_allocation_failed(void) {
  calls_until_failure = 0;
  return has_failed;
}

int64_t check_allocation_count(void) { return allocation_count; }

int main(int argument_count, char **arguments) {
  static const struct {
    const char *name;
    void (*run)(void);
  } tests[] = {
      {"base", test_base},       {"view", test_view},       {"plan", test_plan},
      {"host", test_host},       {"pool", test_pool},       {"handoff", test_handoff},
      {"context", test_context}, {"verbs", test_verbs},     {"reduce", test_reduce},
      {"bucket", test_bucket},   {"order", test_order},     {"memory", test_memory},
      {"span", test_span},       {"nccl", test_nccl},       {"nccl_errors", test_nccl_errors},
      {"recorder", test_recorder}, {"sim", test_sim},
      {"transport_order", test_transport_order}, {"peer_sum", test_peer_sum},
      {"transport_failures", test_transport_failures},
      {"transports", test_transports},
  };
  for (size_t i = 0; i < sizeof tests / sizeof tests[0]; ++i) {
    bool chosen = argument_count == 1;
    for (int k = 1; k < argument_count; ++k) chosen |= strcmp(arguments[k], tests[i].name) == 0;
    if (!chosen) continue;
    int before = atomic_load(&passed_count);
    case_text[0] = '\0';
    tests[i].run();
    printf("%s: %d\n", tests[i].name, atomic_load(&passed_count) - before);
    fflush(stdout);
  }
  printf("%d passed, %d failed\n", atomic_load(&passed_count), atomic_load(&failed_count));
  return atomic_load(&failed_count) > 0;
}

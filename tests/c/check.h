/* Checks for the tests of the core. A failed check is counted, printed with its place and the case
 * that was running, and the test goes on. Any thread may check. */
#ifndef FDP_TEST_CHECK_H
#define FDP_TEST_CHECK_H

#include <stdbool.h>
#include <stdint.h>

#include "../../csrc/status.h"

/* Each test file has one entry. */
void test_base(void);
void test_view(void);
void test_plan(void);
void test_host(void);
void test_pool(void);
void test_handoff(void);
void test_context(void);
void test_verbs(void);
void test_reduce(void);
void test_bucket(void);
void test_sim(void);
void test_order(void);
void test_transport_order(void);
void test_transport_failures(void);
void test_peer_sum(void);
void test_span(void);
void test_recorder(void);
void test_transports(void);
void test_memory(void);
void test_nccl(void);
void test_nccl_errors(void);

/* Says which case of a product is running, in the messages of failed checks. */
void check_case(const char *format, ...) __attribute__((format(printf, 1, 2)));

void check_true(bool is_true, const char *file, int line, const char *text);
void check_equal(int64_t actual, int64_t expected, const char *file, int line, const char *text);
void check_text(const char *actual, const char *expected, const char *file, int line);
/* `status` is as expected; when it is a failure, the thread's message is exactly `message` (NULL:
 * any but an empty one). */
void check_status(fdp_status status, fdp_status expected, const char *message, const char *file,
                  int line);

#define CHECK(condition) check_true((condition), __FILE__, __LINE__, #condition)
#define CHECK_EQUAL(actual, expected) \
  check_equal((int64_t)(actual), (int64_t)(expected), __FILE__, __LINE__, #actual)
#define CHECK_TEXT(actual, expected) check_text((actual), (expected), __FILE__, __LINE__)
#define CHECK_OK(call) check_status((call), FDP_OK, NULL, __FILE__, __LINE__)
#define CHECK_FAILS(call, status, message) \
  check_status((call), (status), (message), __FILE__, __LINE__)

/* Host memory that fails on demand: the n-th allocation from now (1 = the next) returns NULL; 0
 * disarms. Counts the calling thread's allocations only. */
void check_fail_allocation(int64_t nth_call);
/* True if the armed allocation was reached; disarms. */
bool check_allocation_failed(void);
/* What the thread allocates meanwhile neither counts nor fails: it is no work of the core's. */
void check_spare_allocations(bool is_on);
/* Allocations of the calling thread so far. */
int64_t check_allocation_count(void);

#endif

/* Status, log, environment, faults, counters and dtypes. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../../csrc/counters.h"
#include "../../csrc/deadline.h"
#include "../../csrc/dtype.h"
#include "../../csrc/env.h"
#include "../../csrc/fault.h"
#include "../../csrc/limits.h"
#include "../../csrc/log.h"
#include "check.h"

static void *fail_elsewhere(void *unused) {
  (void)unused;
  CHECK_TEXT(fdp_last_message(), "");
  fdp_fail(FDP_ABORTED, "another thread's");
  return NULL;
}

static void test_status(void) {
  static const char *const names[] = {
      "ok",      "invalid argument", "invalid type", "out of memory",  "timed out",
      "aborted", "device error",     "unsupported",  "fault injected", "unknown status",
  };
  for (int code = 0; code < 10; ++code) CHECK_TEXT(fdp_status_name((fdp_status)code), names[code]);
  CHECK_EQUAL(fdp_fail(FDP_TIMED_OUT, "waited %d ms", 7), FDP_TIMED_OUT);
  CHECK_TEXT(fdp_last_message(), "waited 7 ms");
  fdp_fail(FDP_TIMED_OUT, "again: %s", fdp_last_message());
  CHECK_TEXT(fdp_last_message(), "again: waited 7 ms");
  pthread_t thread;
  CHECK_EQUAL(pthread_create(&thread, NULL, fail_elsewhere, NULL), 0);
  pthread_join(thread, NULL);
  CHECK_TEXT(fdp_last_message(), "again: waited 7 ms");
  char longest[2 * FDP_MESSAGE_BYTES];
  memset(longest, 'x', sizeof longest);
  longest[sizeof longest - 1] = '\0';
  fdp_fail(FDP_ABORTED, "%s", longest);
  CHECK_EQUAL(strlen(fdp_last_message()), FDP_MESSAGE_BYTES - 1);
  fdp_message kept, empty = {""};
  fdp_message_keep(&kept);
  fdp_message_restore(&empty);
  CHECK_TEXT(fdp_last_message(), "");
  fdp_fail(FDP_TIMED_OUT, "of the cleanup");
  CHECK_TEXT(kept.text, longest + FDP_MESSAGE_BYTES);
  fdp_message_restore(&kept);
  CHECK_TEXT(fdp_last_message(), longest + FDP_MESSAGE_BYTES);
}

static char logged[FDP_MESSAGE_BYTES];
static fdp_log_level logged_level;

static void sink(void *user, fdp_log_level level, const char *message) {
  *(int *)user += 1;
  logged_level = level;
  strncpy(logged, message, sizeof logged - 1);
}

static void test_log(void) {
  int calls = 0;
  fdp_log(FDP_LOG_ERROR, "nobody listens");
  fdp_log_open(sink, &calls, FDP_LOG_INFO);
  fdp_log(FDP_LOG_DEBUG, "not this");
  CHECK_EQUAL(calls, 0);
  fdp_log(FDP_LOG_INFO, "this %d", 5);
  CHECK_EQUAL(calls, 1);
  CHECK_EQUAL(logged_level, FDP_LOG_INFO);
  CHECK_TEXT(logged, "this 5");
  CHECK(fdp_log_enabled(FDP_LOG_ERROR));
  CHECK(!fdp_log_enabled(FDP_LOG_DEBUG));
  CHECK(!fdp_log_enabled(FDP_LOG_OFF));
  fdp_log_open(sink, &calls, FDP_LOG_OFF);
  fdp_log(FDP_LOG_ERROR, "silenced");
  fdp_log_open(NULL, NULL, FDP_LOG_DEBUG);
  fdp_log(FDP_LOG_ERROR, "no sink");
  CHECK_EQUAL(calls, 1);
  CHECK_TEXT(fdp_log_level_name(FDP_LOG_WARNING), "warning");
  fdp_log_level level = FDP_LOG_OFF;
  unsetenv("FASTDP_LOG");
  CHECK_OK(fdp_log_level_from_env(&level));
  CHECK_EQUAL(level, FDP_LOG_WARNING);
  setenv("FASTDP_LOG", "debug", 1);
  CHECK_OK(fdp_log_level_from_env(&level));
  CHECK_EQUAL(level, FDP_LOG_DEBUG);
  setenv("FASTDP_LOG", "loud", 1);
  CHECK_FAILS(fdp_log_level_from_env(&level), FDP_INVALID_ARGUMENT,
              "FASTDP_LOG is \"loud\": must be one of off|error|warning|info|debug");
  unsetenv("FASTDP_LOG");
}

static void fail_inside(void *user, fdp_log_level level, const char *message) {
  (void)level;
  *(int *)user += (int)strlen(message);
  fdp_fail(FDP_ABORTED, "of the sink");
}

/* Whoever logs may be on the way out of a failure, and a sink runs anybody's code. */
static void test_log_keeps_message(void) {
  int length = 0;
  fdp_log_open(fail_inside, &length, FDP_LOG_INFO);
  fdp_fail(FDP_TIMED_OUT, "what matters");
  fdp_log(FDP_LOG_INFO, "seen");
  CHECK_EQUAL(length, 4);
  CHECK_TEXT(fdp_last_message(), "what matters");
  fdp_log_open(NULL, NULL, FDP_LOG_OFF);
}

static void count_call(void *user, fdp_log_level level, const char *message) {
  (void)level;
  (void)message;
  atomic_store((atomic_bool *)user, true);
}

static void *log_until_told(void *stop) {
  while (!atomic_load((atomic_bool *)stop)) fdp_log(FDP_LOG_INFO, "again");
  return NULL;
}

/* A child of fork has a copy of whatever lock another thread held, and not that thread. */
static void test_log_after_fork(void) {
  static atomic_bool called; /* a child has its own */
  atomic_bool stop = false;
  pthread_t threads[2];
  fdp_log_open(count_call, &called, FDP_LOG_INFO);
  for (int i = 0; i < 2; ++i) {
    CHECK_EQUAL(pthread_create(&threads[i], NULL, log_until_told, &stop), 0);
  }
  int status = 0;
  for (int round = 0; round < 100 && status == 0; ++round) {
    pid_t child = fork();
    if (child == 0) {
      alarm(60); /* ends a child that hangs */
      atomic_store(&called, false);
      fdp_log(FDP_LOG_INFO, "of the child");
      fdp_log_open(count_call, &called, FDP_LOG_INFO);
      _exit(atomic_load(&called) ? 0 : 1);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
  }
  CHECK_EQUAL(status, 0);
  atomic_store(&stop, true);
  for (int i = 0; i < 2; ++i) pthread_join(threads[i], NULL);
  fdp_log_open(NULL, NULL, FDP_LOG_OFF);
}

static void test_env(void) {
  for (int id = 0; id < FDP_ENV_COUNT; ++id) {
    const fdp_env_variable *variable = fdp_env_describe((fdp_env_id)id);
    CHECK(strncmp(variable->name, "FASTDP_", 7) == 0);
    CHECK(variable->sentence[strlen(variable->sentence) - 1] == '.');
    unsetenv(variable->name);
    int64_t number = -1;
    int32_t choice = -1;
    if (variable->type == FDP_ENV_INTEGER) {
      CHECK_OK(fdp_env_integer((fdp_env_id)id, &number));
      CHECK_EQUAL(number, strtoll(variable->standard, NULL, 10));
    }
    if (variable->type == FDP_ENV_CHOICE) {
      CHECK_OK(fdp_env_choice((fdp_env_id)id, &choice));
      CHECK_TEXT(fdp_env_choice_name((fdp_env_id)id, choice), variable->standard);
    }
  }
  int64_t number = 0;
  CHECK_OK(fdp_env_integer(FDP_ENV_TIMEOUT_MS, &number));
  CHECK_EQUAL(number, FDP_DEFAULT_TIMEOUT_MS);
  setenv("FASTDP_TIMEOUT_MS", "250", 1);
  CHECK_OK(fdp_env_integer(FDP_ENV_TIMEOUT_MS, &number));
  CHECK_EQUAL(number, 250);
  setenv("FASTDP_TIMEOUT_MS", "", 1);
  CHECK_OK(fdp_env_integer(FDP_ENV_TIMEOUT_MS, &number));
  CHECK_EQUAL(number, FDP_DEFAULT_TIMEOUT_MS);
  const char *const wrong[] = {"0", "-3", "1 s", "abc", "86400001", "99999999999999999999"};
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; ++i) {
    char message[200];
    snprintf(message, sizeof message,
             "FASTDP_TIMEOUT_MS is \"%s\": must be an integer from 1 to 86400000", wrong[i]);
    setenv("FASTDP_TIMEOUT_MS", wrong[i], 1);
    CHECK_FAILS(fdp_env_integer(FDP_ENV_TIMEOUT_MS, &number), FDP_INVALID_ARGUMENT, message);
  }
  unsetenv("FASTDP_TIMEOUT_MS");
  CHECK_TEXT(fdp_env_choice_name(FDP_ENV_UNUSED_GRAD, 2), "");
  CHECK_TEXT(fdp_env_choice_name(FDP_ENV_UNUSED_GRAD, -1), "");
}

static void test_faults_and_counters(void) {
  for (int point = 0; point < FDP_FAULT_POINT_COUNT; ++point) {
    CHECK_OK(fdp_fault_check((fdp_fault_point)point));
    fdp_fault_arm((fdp_fault_point)point, 3);
    CHECK_OK(fdp_fault_check((fdp_fault_point)point));
    CHECK_OK(fdp_fault_check((fdp_fault_point)point));
    char message[100];
    snprintf(message, sizeof message, "%s: this call was told to fail",
             fdp_fault_name((fdp_fault_point)point));
    CHECK_FAILS(fdp_fault_check((fdp_fault_point)point), FDP_FAULT_INJECTED, message);
    CHECK_OK(fdp_fault_check((fdp_fault_point)point));
    fdp_fault_arm((fdp_fault_point)point, 1);
    fdp_fault_arm((fdp_fault_point)point, 0);
    CHECK_OK(fdp_fault_check((fdp_fault_point)point));
  }
  CHECK_TEXT(fdp_fault_name(FDP_FAULT_MEMORY_TAKE), "memory_take");
  CHECK_TEXT(fdp_fault_name(FDP_FAULT_POINT_COUNT), "unknown");
  fdp_counters_reset();
  for (int verb = 0; verb < FDP_VERB_COUNT; ++verb) {
    fdp_counters_add((fdp_verb)verb, 10 + verb, 2);
    fdp_counters_add((fdp_verb)verb, 1, 1);
    fdp_verb_counters counters = fdp_counters_read((fdp_verb)verb);
    CHECK_EQUAL(counters.calls, 2);
    CHECK_EQUAL(counters.bytes, 11 + verb);
    CHECK_EQUAL(counters.chunks, 3);
    CHECK_TEXT(fdp_verb_name((fdp_verb)verb), fdp_fault_name((fdp_fault_point)verb));
  }
  fdp_counters_reset();
  for (int verb = 0; verb < FDP_VERB_COUNT; ++verb) {
    CHECK_EQUAL(fdp_counters_read((fdp_verb)verb).calls, 0);
  }
  CHECK_TEXT(fdp_verb_name(FDP_VERB_COUNT), "unknown");
}

static void test_dtype(void) {
  static const struct {
    fdp_dtype dtype;
    size_t bytes;
    bool can_sum;
    const char *name;
  } cases[] = {
      {{FDP_CODE_FLOAT, 64, 1}, 8, true, "float64"},
      {{FDP_CODE_FLOAT, 32, 1}, 4, true, "float32"},
      {{FDP_CODE_FLOAT, 16, 1}, 2, true, "float16"},
      {{FDP_CODE_BFLOAT, 16, 1}, 2, true, "bfloat16"},
      {{FDP_CODE_COMPLEX, 128, 1}, 16, true, "complex128"},
      {{FDP_CODE_COMPLEX, 32, 1}, 4, true, "complex32"},
      {{FDP_CODE_INT, 8, 1}, 1, true, "int8"},
      {{FDP_CODE_UINT, 64, 1}, 8, true, "uint64"},
      {{FDP_CODE_BOOL, 8, 1}, 1, true, "bool"},
      {{FDP_CODE_FLOAT, 32, 2}, 8, false, "dtype(2,32,2)"},
      {{FDP_CODE_FLOAT, 8, 1}, 1, false, "dtype(2,8,1)"},
      {{FDP_CODE_BFLOAT, 32, 1}, 4, false, "dtype(4,32,1)"},
      {{FDP_CODE_COMPLEX, 16, 1}, 2, false, "dtype(5,16,1)"},
      {{FDP_CODE_INT, 4, 2}, 1, false, "dtype(0,4,2)"},
      {{FDP_CODE_UINT, 4, 1}, 0, false, "dtype(1,4,1)"},
      {{FDP_CODE_INT, 8, 0}, 0, false, "dtype(0,8,0)"},
      {{17, 4, 2}, 1, false, "dtype(17,4,2)"},
  };
  char text[48];
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
    check_case("%s", cases[i].name);
    CHECK_EQUAL(fdp_dtype_bytes(cases[i].dtype), cases[i].bytes);
    CHECK_EQUAL(fdp_dtype_can_sum(cases[i].dtype), cases[i].can_sum);
    CHECK_TEXT(fdp_dtype_name(cases[i].dtype, text, sizeof text), cases[i].name);
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; ++k) {
      CHECK_EQUAL(fdp_dtype_equal(cases[i].dtype, cases[k].dtype), i == k);
    }
  }
  CHECK_TEXT(fdp_dtype_name(cases[0].dtype, text, 4), "flo");
  check_case("%s", "");
}

static void *read_deadline(void *left_ms) {
  *(int64_t *)left_ms = fdp_deadline_or(3);
  return NULL;
}

static void test_deadline(void) {
  pthread_t other;
  int64_t left_ms = 0;
  fdp_deadline_pass(); /* of no deadline */
  CHECK_EQUAL(fdp_deadline_or(7), 7);
  CHECK_EQUAL(fdp_deadline_exchange(60000), 0);
  fdp_deadline_start();
  CHECK(fdp_deadline_or(7) > 50000 && fdp_deadline_or(7) <= 60000);
  CHECK_EQUAL(pthread_create(&other, NULL, read_deadline, &left_ms), 0);
  pthread_join(other, NULL);
  CHECK_EQUAL(left_ms, 3); /* each thread has its own */
  fdp_deadline_pass();
  CHECK_EQUAL(fdp_deadline_or(7), 0);
  fdp_deadline_start();
  CHECK(fdp_deadline_or(7) > 50000);
  CHECK_EQUAL(fdp_deadline_exchange(1), 60000);
  nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
  CHECK_EQUAL(fdp_deadline_or(7), 0);
  CHECK_EQUAL(fdp_deadline_exchange(0), 1);
  CHECK_EQUAL(fdp_deadline_or(7), 7);
}

void test_base(void) {
  test_deadline();
  test_status();
  test_log();
  test_log_keeps_message();
  test_log_after_fork();
  test_env();
  test_faults_and_counters();
  test_dtype();
}

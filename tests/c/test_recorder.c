/* The flight recorder: what it keeps, what it tells, and what it costs. */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "../../csrc/recorder.h"
#include "check.h"

#define THREADS 4
#define CALLS 20000

static const fdp_device_id host = {FDP_DEVICE_HOST, 0};
static const fdp_device_id second_gpu = {FDP_DEVICE_CUDA, 1};

/* The newest record with that number, or NULL. */
static const fdp_record *find(const fdp_record *records, int32_t count, int64_t number) {
  for (int32_t i = 0; i < count; ++i) {
    if (records[i].number == number) return &records[i];
  }
  return NULL;
}

static void test_states(void) {
  static fdp_record records[FDP_RECORDER_LENGTH];
  static char text[FDP_RECORDER_TEXT_BYTES];
  char wanted[200];
  int64_t good = fdp_recorder_begin(FDP_VERB_SCATTER, 0, 96, host, NULL, 2);
  fdp_recorder_end(good, FDP_OK);
  int64_t bad = fdp_recorder_begin(FDP_VERB_BUCKET_REDUCE, 7, INT64_MAX, second_gpu,
                                   (const void *)(uintptr_t)0xbeef, 64);
  fdp_recorder_end(bad, FDP_TIMED_OUT);
  int64_t open = fdp_recorder_begin(FDP_VERB_GATHER, 0, 0, host, NULL, 1);
  CHECK(good > 0 && bad == good + 1 && open == bad + 1);
  int32_t count = fdp_recorder_read(records);
  const fdp_record *record = find(records, count, good);
  CHECK(record && record->verb == FDP_VERB_SCATTER && record->size_bytes == 96);
  CHECK(record && !record->is_running && record->status == FDP_OK && record->other_count == 2);
  record = find(records, count, bad);
  CHECK(record && record->verb == FDP_VERB_BUCKET_REDUCE && record->bucket == 7);
  CHECK(record && record->size_bytes == INT64_MAX && record->status == FDP_TIMED_OUT);
  CHECK(record && record->stream == (const void *)(uintptr_t)0xbeef);
  CHECK(record && record->device.kind == FDP_DEVICE_CUDA && record->device.ordinal == 1);
  record = find(records, count, open);
  CHECK(record && record->is_running && records[count - 1].number == open);
  fdp_recorder_text(text, sizeof text);
  snprintf(wanted, sizeof wanted, "\n#%lld bucket_reduce of bucket 7, 9223372036854775807 bytes on "
           "cuda:1 stream 0xbeef, others: 64, ", (long long)bad);
  CHECK(strstr(text, wanted) != NULL);
  CHECK(strstr(text, " ms ago: failed, timed out\n") != NULL);
  snprintf(wanted, sizeof wanted, "\n#%lld scatter, 96 bytes on cpu:0 stream 0x0, others: 2, ",
           (long long)good);
  CHECK(strstr(text, wanted) != NULL && strstr(text, " ms ago: enqueued\n") != NULL);
  CHECK(strcmp(text + strlen(text) - 9, " running\n") == 0);
  fdp_recorder_end(open, FDP_OK);
}

static void test_ring(void) {
  static fdp_record records[FDP_RECORDER_LENGTH];
  int64_t late = fdp_recorder_begin(FDP_VERB_REDUCE, 0, 1, host, NULL, 1);
  int64_t number = 0;
  for (int i = 0; i < 3 * FDP_RECORDER_LENGTH; ++i) {
    number = fdp_recorder_begin(FDP_VERB_GATHER, 0, i, host, NULL, 1);
    fdp_recorder_end(number, FDP_OK);
  }
  /* Its place is another record's by now, which its end may not touch. */
  fdp_recorder_end(late, FDP_ABORTED);
  CHECK_EQUAL(fdp_recorder_read(records), FDP_RECORDER_LENGTH);
  for (int i = 0; i < FDP_RECORDER_LENGTH; ++i) {
    CHECK_EQUAL(records[i].number, number - FDP_RECORDER_LENGTH + 1 + i);
    CHECK_EQUAL(records[i].status, FDP_OK);
    CHECK_EQUAL(records[i].size_bytes, 2 * FDP_RECORDER_LENGTH + i);
  }
}

static void test_short_text(void) {
  static char whole[FDP_RECORDER_TEXT_BYTES];
  char text[64];
  fdp_recorder_text(whole, sizeof whole);
  CHECK(strlen(whole) < sizeof whole - 1);
  for (size_t size_bytes = 0; size_bytes <= sizeof text; ++size_bytes) {
    memset(text, 'x', sizeof text);
    fdp_recorder_text(text, size_bytes);
    if (size_bytes < sizeof text) CHECK_EQUAL(text[size_bytes], 'x');
    if (size_bytes > 0) CHECK_EQUAL(strlen(text), size_bytes - 1);
    if (size_bytes > 0 && size_bytes < 28) CHECK(strncmp(text, whole, size_bytes - 1) == 0);
  }
}

/* Records in which every number is the same, so that a mixture of two would show. */
static void *write_many(void *number) {
  int32_t mine = *(const int32_t *)number;
  for (int i = 0; i < CALLS; ++i) {
    int32_t value = mine * CALLS + i;
    fdp_device_id device = {FDP_DEVICE_CUDA, value};
    int64_t record = fdp_recorder_begin(FDP_VERB_REDUCE, value, value, device,
                                        (const void *)(uintptr_t)value, mine);
    fdp_recorder_end(record, i % 2 ? FDP_OK : FDP_ABORTED);
  }
  return NULL;
}

static void test_threads(void) {
  static fdp_record records[FDP_RECORDER_LENGTH];
  static char text[FDP_RECORDER_TEXT_BYTES];
  pthread_t threads[THREADS];
  int32_t numbers[THREADS];
  int64_t first = fdp_recorder_begin(FDP_VERB_REDUCE, 0, 0, host, NULL, 1);
  for (int32_t i = 0; i < THREADS; ++i) {
    numbers[i] = i + 1;
    CHECK_EQUAL(pthread_create(&threads[i], NULL, write_many, &numbers[i]), 0);
  }
  bool is_whole = true;
  bool is_ascending = true;
  int64_t seen = 0;
  for (int round = 0; round < 300; ++round) {
    int32_t count = fdp_recorder_read(records);
    fdp_recorder_text(text, sizeof text);
    for (int32_t i = 0; i < count; ++i) {
      const fdp_record *record = &records[i];
      if (i > 0 && record->number <= records[i - 1].number) is_ascending = false;
      if (record->number <= first) continue;
      ++seen;
      int64_t value = record->size_bytes;
      is_whole = is_whole && record->bucket == value && record->device.ordinal == value;
      is_whole = is_whole && (int64_t)(uintptr_t)record->stream == value;
      is_whole = is_whole && record->other_count == value / CALLS;
      if (!record->is_running) {
        is_whole = is_whole && record->status == (value % 2 ? FDP_OK : FDP_ABORTED);
      }
    }
  }
  for (int i = 0; i < THREADS; ++i) pthread_join(threads[i], NULL);
  CHECK(is_whole);
  CHECK(is_ascending);
  CHECK(seen > 0);
  CHECK_EQUAL(fdp_recorder_begin(FDP_VERB_REDUCE, 0, 0, host, NULL, 1),
              first + THREADS * CALLS + 1);
}

/* What SIGUSR1 writes to the standard error, which is a pipe meanwhile: all of it fits into one. */
static void test_signal(void) {
  static char text[FDP_RECORDER_TEXT_BYTES];
  static char heard[FDP_RECORDER_TEXT_BYTES];
  int ends[2];
  size_t size_bytes = 0;
  for (int i = 0; i < 4; ++i) {
    fdp_recorder_end(fdp_recorder_begin(FDP_VERB_SCATTER, 0, i, host, NULL, 1), FDP_OK);
  }
  CHECK_OK(fdp_recorder_on_signal());
  CHECK_OK(fdp_recorder_on_signal());
  int kept = dup(STDERR_FILENO);
  CHECK(kept >= 0 && pipe(ends) == 0 && dup2(ends[1], STDERR_FILENO) >= 0);
  CHECK_EQUAL(raise(SIGUSR1), 0);
  CHECK(dup2(kept, STDERR_FILENO) >= 0);
  close(kept);
  close(ends[1]);
  for (ssize_t count = 1; count > 0; size_bytes += (size_t)count) {
    count = read(ends[0], heard + size_bytes, sizeof heard - 1 - size_bytes);
    if (count < 0) break;
  }
  close(ends[0]);
  fdp_recorder_text(text, sizeof text);
  CHECK(strncmp(heard, text, 60) == 0);
  CHECK(strstr(heard, " scatter, 3 bytes on cpu:0 stream 0x0, others: 1, ") != NULL);
  signal(SIGUSR1, SIG_IGN);
  CHECK_FAILS(fdp_recorder_on_signal(), FDP_UNSUPPORTED,
              "SIGUSR1: somebody else handles it already");
  signal(SIGUSR1, SIG_DFL);
}

/* The best of many rounds is what it costs; the others were disturbed. */
static void test_cost(void) {
  int64_t best_ns = INT64_MAX;
  for (int round = 0; round < 300; ++round) {
    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int i = 0; i < 1000; ++i) {
      fdp_recorder_end(fdp_recorder_begin(FDP_VERB_REDUCE, 1, i, host, NULL, 2), FDP_OK);
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    int64_t spent_ns = (end.tv_sec - start.tv_sec) * 1000000000 + end.tv_nsec - start.tv_nsec;
    if (spent_ns < best_ns) best_ns = spent_ns;
  }
  printf("recorder: %.1f ns a record\n", (double)best_ns / 1000);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  CHECK(best_ns < 50 * 1000);
#endif
}

void test_recorder(void) {
  test_states();
  test_short_text();
  test_ring();
  test_threads();
  test_signal();
  test_cost();
}

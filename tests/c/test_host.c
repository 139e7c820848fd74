/* The host device: streams, records of events, deadlines, aborts, failures inside a stream. */
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/device_host.h"
#include "check.h"
#include "host_work.h"

static fdp_status count_up(void *counter) {
  atomic_fetch_add((atomic_int *)counter, 1);
  return FDP_OK;
}

typedef struct bench {
  fdp_device *device;
  const fdp_device_ops *ops;
  fdp_stream *streams[2];
  fdp_event *event;
} bench;

static bench bench_open(int64_t timeout_ms, const volatile int *abort_flag) {
  bench made = {0};
  fdp_device_host_options options = {.timeout_ms = timeout_ms, .abort_flag = abort_flag};
  CHECK_OK(fdp_device_host_open(&options, &made.device));
  made.ops = made.device->ops;
  for (int i = 0; i < 2; ++i) CHECK_OK(made.ops->stream_open(made.device, &made.streams[i]));
  CHECK_OK(made.ops->event_open(made.device, &made.event));
  return made;
}

static void bench_close(bench *made) {
  made->ops->event_close(made->device, made->event);
  for (int i = 0; i < 2; ++i) made->ops->stream_close(made->device, made->streams[i]);
  made->ops->close(made->device);
}

static fdp_status synchronize(bench *made, fdp_stream *stream) {
  fdp_event *event = NULL;
  CHECK_OK(made->ops->event_open(made->device, &event));
  CHECK_OK(made->ops->event_record(made->device, event, stream));
  fdp_status status = made->ops->event_synchronize(made->device, event, 20000, NULL);
  made->ops->event_close(made->device, event);
  return status;
}

/* A wait keeps the record that it saw, and a later record that passes first does not release it. */
static void test_records(void) {
  bench made = bench_open(20000, NULL);
  sem_t gate;
  sem_init(&gate, 0, 0);
  atomic_int count = 0;
  bool passed = false;
  CHECK_OK(made.ops->event_query(made.device, made.event, &passed));
  CHECK(passed); /* never recorded */
  CHECK_OK(made.ops->stream_wait(made.device, made.streams[1], made.event));
  CHECK_OK(fdp_device_host_enqueue(made.device, made.streams[0], wait_for_semaphore, &gate));
  CHECK_OK(made.ops->event_record(made.device, made.event, made.streams[0]));
  CHECK_OK(made.ops->event_query(made.device, made.event, &passed));
  CHECK(!passed);
  CHECK_OK(made.ops->stream_wait(made.device, made.streams[1], made.event));
  CHECK_OK(fdp_device_host_enqueue(made.device, made.streams[1], count_up, &count));
  CHECK_OK(made.ops->event_record(made.device, made.event, NULL)); /* replaces: has passed */
  CHECK_OK(made.ops->event_query(made.device, made.event, &passed));
  CHECK(passed);
  CHECK_OK(made.ops->event_synchronize(made.device, made.event, 0, NULL));
  sleep_ms(30);
  CHECK_EQUAL(atomic_load(&count), 0); /* stream 1 waits for the first record still */
  sem_post(&gate);
  CHECK_OK(synchronize(&made, made.streams[1]));
  CHECK_EQUAL(atomic_load(&count), 1);
  bench_close(&made);
  sem_destroy(&gate);
}

static void test_deadlines(void) {
  int stop = 0;
  bench made = bench_open(60, &stop);
  sem_t gate;
  sem_init(&gate, 0, 0);
  CHECK_OK(fdp_device_host_enqueue(made.device, made.streams[0], wait_for_semaphore, &gate));
  CHECK_OK(made.ops->event_record(made.device, made.event, made.streams[0]));
  int64_t start = now_ms();
  CHECK_FAILS(made.ops->event_synchronize(made.device, made.event, 40, NULL), FDP_TIMED_OUT,
              "host: an event did not pass within 40 ms");
  CHECK(now_ms() - start >= 40);
  int flag = 1;
  start = now_ms();
  CHECK_FAILS(made.ops->event_synchronize(made.device, made.event, 20000, &flag), FDP_ABORTED,
              "host: a wait for an event was told to stop");
  CHECK(now_ms() - start < 10000);
  /* The NULL stream waits on the calling thread, with the device's deadline. */
  CHECK_FAILS(made.ops->stream_wait(made.device, NULL, made.event), FDP_TIMED_OUT,
              "host: an event did not pass within 60 ms");
  __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
  CHECK_FAILS(made.ops->stream_wait(made.device, NULL, made.event), FDP_ABORTED, NULL);
  /* So does a stream: it fails, and says so to whoever waits for it. */
  CHECK_OK(made.ops->stream_wait(made.device, made.streams[1], made.event));
  CHECK_FAILS(synchronize(&made, made.streams[1]), FDP_ABORTED,
              "host: a wait for an event was told to stop");
  sem_post(&gate);
  CHECK_OK(synchronize(&made, made.streams[0]));
  bench_close(&made);
  sem_destroy(&gate);
}

static void test_stream_deadline(void) {
  bench made = bench_open(30, NULL);
  sem_t gate;
  sem_init(&gate, 0, 0);
  CHECK_OK(fdp_device_host_enqueue(made.device, made.streams[0], wait_for_semaphore, &gate));
  CHECK_OK(made.ops->event_record(made.device, made.event, made.streams[0]));
  CHECK_OK(made.ops->stream_wait(made.device, made.streams[1], made.event));
  CHECK_FAILS(synchronize(&made, made.streams[1]), FDP_TIMED_OUT,
              "host: an event did not pass within 30 ms");
  sem_post(&gate);
  bench_close(&made);
  sem_destroy(&gate);
}

/* A failed stream skips its work, passes its events, and hands the failure on. */
static void test_failures(void) {
  bench made = bench_open(20000, NULL);
  atomic_int count = 0;
  bool passed = false;
  CHECK_OK(fdp_device_host_enqueue(made.device, made.streams[0], count_up, &count));
  CHECK_OK(fdp_device_host_enqueue(made.device, made.streams[0], fail, NULL));
  CHECK_OK(fdp_device_host_enqueue(made.device, made.streams[0], count_up, &count));
  int32_t source = 1, target = 0;
  CHECK_OK(made.ops->copy(made.device, made.streams[0], &target, &source, sizeof source));
  CHECK_OK(made.ops->event_record(made.device, made.event, made.streams[0]));
  CHECK_FAILS(made.ops->event_synchronize(made.device, made.event, 20000, NULL), FDP_DEVICE_ERROR,
              "on purpose");
  CHECK_FAILS(made.ops->event_query(made.device, made.event, &passed), FDP_DEVICE_ERROR,
              "on purpose");
  CHECK(passed);
  CHECK_EQUAL(atomic_load(&count), 1);
  CHECK_EQUAL(target, 0);
  CHECK_OK(made.ops->stream_wait(made.device, made.streams[1], made.event));
  CHECK_OK(fdp_device_host_enqueue(made.device, made.streams[1], count_up, &count));
  CHECK_FAILS(synchronize(&made, made.streams[1]), FDP_DEVICE_ERROR, "on purpose");
  CHECK_FAILS(synchronize(&made, made.streams[0]), FDP_DEVICE_ERROR, "on purpose");
  CHECK_FAILS(made.ops->stream_wait(made.device, NULL, made.event), FDP_DEVICE_ERROR,
              "on purpose");
  CHECK_EQUAL(atomic_load(&count), 1);
  CHECK_FAILS(fdp_device_host_enqueue(made.device, NULL, fail, NULL), FDP_DEVICE_ERROR,
              "on purpose");
  bench_close(&made);
}

/* Closing waits for what was enqueued; past the deadline it leaves the thread to end by itself. */
static void test_close(void) {
  bench made = bench_open(30, NULL);
  atomic_int count = 0;
  fdp_stream *stream = NULL;
  CHECK_OK(made.ops->stream_open(made.device, &stream));
  for (int i = 0; i < 100; ++i) {
    CHECK_OK(fdp_device_host_enqueue(made.device, stream, count_up, &count));
  }
  made.ops->stream_close(made.device, stream);
  CHECK_EQUAL(atomic_load(&count), 100);
  static sem_t gate; /* outlives this function, as the abandoned thread may */
  static atomic_int after;
  sem_init(&gate, 0, 0);
  CHECK_OK(made.ops->stream_open(made.device, &stream));
  CHECK_OK(fdp_device_host_enqueue(made.device, stream, wait_for_semaphore, &gate));
  CHECK_OK(fdp_device_host_enqueue(made.device, stream, count_up, &after));
  int64_t start = now_ms();
  made.ops->stream_close(made.device, stream);
  CHECK(now_ms() - start >= 30);
  CHECK_EQUAL(atomic_load(&after), 0);
  sem_post(&gate);
  for (int i = 0; i < 2000 && atomic_load(&after) == 0; ++i) sleep_ms(1);
  CHECK_EQUAL(atomic_load(&after), 1);
  made.ops->stream_close(made.device, NULL);
  bench_close(&made);
}

/* Argument arrays are read before the call returns: they are spoiled right after it. */
static void test_arguments(void) {
  bench made = bench_open(20000, NULL);
  enum { COUNT = 16 };
  int32_t source[COUNT], other[COUNT], target[4][COUNT], flat[COUNT], wanted[COUNT];
  sem_t gate;
  sem_init(&gate, 0, 0);
  for (int32_t i = 0; i < COUNT; ++i) source[i] = i, other[i] = 100 * i, wanted[i] = 101 * i;
  for (int pass = 0; pass < 2; ++pass) {
    fdp_stream *stream = pass == 0 ? NULL : made.streams[0];
    memset(target, 0, sizeof target);
    memset(flat, 0, sizeof flat);
    if (stream) CHECK_OK(fdp_device_host_enqueue(made.device, stream, wait_for_semaphore, &gate));
    fdp_strided_copy strided = {.target = target[0], .source = source, .item_bytes = sizeof source};
    fdp_segment segment = {source, 0, sizeof source};
    fdp_segment back = {target[1], 0, sizeof source};
    const void *sources[] = {source, other};
    fdp_sum sum = {.target = target[2], .sources = sources, .source_count = 2,
                   .count_elems = COUNT, .dtype = {FDP_CODE_INT, 32, 1}};
    CHECK_OK(made.ops->copy_strided(made.device, stream, &strided, 1));
    CHECK_OK(made.ops->pack(made.device, stream, flat, &segment, 1));
    CHECK_OK(made.ops->unpack(made.device, stream, flat, &back, 1));
    CHECK_OK(made.ops->sum(made.device, stream, &sum, 1));
    CHECK_OK(made.ops->copy(made.device, stream, target[3], source, sizeof source));
    CHECK_OK(made.ops->copy(made.device, stream, NULL, NULL, 0));
    memset(&strided, 0, sizeof strided);
    memset(&segment, 0, sizeof segment);
    memset(&back, 0, sizeof back);
    memset(&sum, 0, sizeof sum);
    memset(sources, 0, sizeof sources);
    if (stream) sem_post(&gate);
    CHECK_OK(synchronize(&made, stream));
    CHECK_EQUAL(memcmp(target[0], source, sizeof source), 0);
    CHECK_EQUAL(memcmp(target[1], source, sizeof source), 0);
    CHECK_EQUAL(memcmp(target[2], wanted, sizeof source), 0);
    CHECK_EQUAL(memcmp(target[3], source, sizeof source), 0);
    CHECK_EQUAL(memcmp(flat, source, sizeof source), 0);
  }
  bench_close(&made);
  sem_destroy(&gate);
}

static void test_memory_of_device(void) {
  bench made = bench_open(20000, NULL);
  const size_t sizes[] = {0, 1, 63, 64, 65, 100000};
  for (size_t i = 0; i < 6; ++i) {
    void *address = NULL;
    CHECK_OK(made.ops->memory_take(made.device, sizes[i], &address));
    CHECK(address && (uintptr_t)address % FDP_ALIGNMENT_BYTES == 0);
    memset(address, 1, sizes[i]);
    made.ops->memory_drop(made.device, address);
  }
  void *address = NULL;
  CHECK_FAILS(made.ops->memory_take(made.device, SIZE_MAX - 5, &address), FDP_OUT_OF_MEMORY,
              "host: no memory for 18446744073709551610 bytes");
  bench_close(&made);
}

/* Every allocation of the device fails once; nothing leaks and nothing is half enqueued. */
static void test_failing_allocations(void) {
  bench made = bench_open(20000, NULL);
  int32_t source = 5, target = 0;
  const void *sources[] = {&source};
  fdp_sum sum = {.target = &target, .sources = sources, .source_count = 1, .count_elems = 1,
                 .dtype = {FDP_CODE_INT, 32, 1}};
  sem_t gate; /* so that the first record has not passed when it is waited for */
  sem_init(&gate, 0, 0);
  CHECK_OK(fdp_device_host_enqueue(made.device, made.streams[0], wait_for_semaphore, &gate));
  CHECK_OK(made.ops->event_record(made.device, made.event, made.streams[0]));
  fdp_device *device = NULL;
  fdp_stream *stream = NULL;
  fdp_event *event = NULL;
  fdp_device_host_options options = {.timeout_ms = 1};
#define FAILS_AT(nth, call)                        \
  check_fail_allocation(nth);                      \
  CHECK_FAILS(call, FDP_OUT_OF_MEMORY, NULL);      \
  CHECK(check_allocation_failed())
  FAILS_AT(1, fdp_device_host_open(&options, &device));
  FAILS_AT(1, made.ops->stream_open(made.device, &stream));
  FAILS_AT(1, made.ops->event_open(made.device, &event));
  FAILS_AT(1, made.ops->event_record(made.device, made.event, made.streams[1]));
  FAILS_AT(2, made.ops->event_record(made.device, made.event, made.streams[1]));
  FAILS_AT(1, made.ops->stream_wait(made.device, made.streams[1], made.event));
  FAILS_AT(1, made.ops->copy(made.device, made.streams[1], &target, &source, 4));
  FAILS_AT(1, made.ops->sum(made.device, made.streams[1], &sum, 1));
  FAILS_AT(1, fdp_device_host_enqueue(made.device, made.streams[1], fail, NULL));
  sem_post(&gate);
  CHECK_OK(synchronize(&made, made.streams[1]));
  CHECK_EQUAL(target, 0);
  bench_close(&made);
  sem_destroy(&gate);
}

void test_host(void) {
  test_records();
  test_deadlines();
  test_stream_deadline();
  test_failures();
  test_close();
  test_arguments();
  test_memory_of_device();
  test_failing_allocations();
}

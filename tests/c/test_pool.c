/* The pool: reuse, the wait for the last use, the bound, the debug fill, and failures. */
#include <pthread.h>
#include <semaphore.h>
#include <string.h>

#include "../../csrc/device_host.h"
#include "../../csrc/fault.h"
#include "../../csrc/pool.h"
#include "check.h"
#include "host_work.h"

typedef struct bench {
  fdp_device *device;
  fdp_stream *streams[2];
  fdp_pool *pool;
} bench;

static bench bench_open(int64_t timeout_ms, int64_t idle_limit_bytes) {
  bench made = {0};
  fdp_device_host_options options = {.timeout_ms = timeout_ms};
  CHECK_OK(fdp_device_host_open(&options, &made.device));
  for (int i = 0; i < 2; ++i) {
    CHECK_OK(made.device->ops->stream_open(made.device, &made.streams[i]));
  }
  CHECK_OK(fdp_pool_open(made.device, idle_limit_bytes, &made.pool));
  return made;
}

static void bench_close(bench *made) {
  for (int i = 0; i < 2; ++i) made->device->ops->stream_close(made->device, made->streams[i]);
  fdp_pool_close(made->pool);
  made->device->ops->close(made->device);
}

static void test_sizes(void) {
  bench made = bench_open(20000, INT64_MAX);
  const int64_t sizes[] = {0, 1, 511, 512, 513, 640, 641, 4095, 4096, 4097, 1000003};
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; ++i) {
    check_case("size %d", (int)sizes[i]);
    fdp_buffer *buffer = NULL;
    CHECK_OK(fdp_pool_take(made.pool, sizes[i], NULL, &buffer));
    CHECK(buffer->size_bytes >= sizes[i]);
    CHECK(buffer->size_bytes <= sizes[i] + sizes[i] / 4 + 512);
    CHECK_EQUAL((uintptr_t)buffer->data % FDP_ALIGNMENT_BYTES, 0);
    memset(buffer->data, 1, (size_t)buffer->size_bytes);
    CHECK_OK(fdp_pool_give(made.pool, buffer, NULL));
  }
  check_case("%s", "");
  fdp_buffer *buffer = NULL;
  CHECK_FAILS(fdp_pool_take(made.pool, INT64_MAX, NULL, &buffer), FDP_OUT_OF_MEMORY,
              "pool: 9223372036854775807 bytes asked for, at most 126100789566373888 can be");
  CHECK_OK(fdp_pool_give(made.pool, NULL, NULL));
  bench_close(&made);
}

/* After the first round nothing is taken from the device, and the most recent comes first. */
static void test_steady_state(void) {
  bench made = bench_open(20000, INT64_MAX);
  int64_t device_takes = 0, allocations = 0;
  for (int round = 0; round < 100; ++round) {
    fdp_buffer *buffers[3];
    for (int i = 0; i < 3; ++i) {
      CHECK_OK(fdp_pool_take(made.pool, 3000 + 10 * i, made.streams[i % 2], &buffers[i]));
    }
    CHECK(buffers[0]->data != buffers[1]->data && buffers[0]->data != buffers[2]->data);
    fdp_pool_stats stats = fdp_pool_read_stats(made.pool);
    CHECK_EQUAL(stats.lent_count, 3);
    CHECK_EQUAL(stats.idle_count, 0);
    for (int i = 0; i < 3; ++i) {
      CHECK_OK(fdp_pool_give(made.pool, buffers[i], made.streams[i % 2]));
    }
    stats = fdp_pool_read_stats(made.pool);
    CHECK_EQUAL(stats.lent_bytes, 0);
    CHECK_EQUAL(stats.idle_bytes, 3 * 3072);
    if (round == 0) device_takes = stats.device_takes;
    CHECK_EQUAL(stats.device_takes, device_takes);
  }
  fdp_buffer *buffer = NULL;
  for (int round = 0; round < 3; ++round) { /* on the host's NULL stream not even host memory */
    if (round == 1) allocations = check_allocation_count();
    CHECK_OK(fdp_pool_take(made.pool, 9000, NULL, &buffer));
    CHECK_OK(fdp_pool_give(made.pool, buffer, NULL));
  }
  CHECK_EQUAL(check_allocation_count(), allocations);
  CHECK_EQUAL(fdp_pool_read_stats(made.pool).device_takes, device_takes + 1);
  bench_close(&made);
}

/* The next taker's stream runs only after the last use. */
static void test_last_use(void) {
  bench made = bench_open(20000, INT64_MAX);
  sem_t gate;
  sem_init(&gate, 0, 0);
  fdp_buffer *first = NULL, *second = NULL;
  const fdp_device_ops *ops = made.device->ops;
  static char ones[512], twos[512], seen[512];
  memset(ones, 1, sizeof ones);
  memset(twos, 2, sizeof twos);
  CHECK_OK(fdp_pool_take(made.pool, sizeof ones, made.streams[0], &first));
  CHECK_OK(fdp_device_host_enqueue(made.device, made.streams[0], wait_for_semaphore, &gate));
  CHECK_OK(ops->copy(made.device, made.streams[0], first->data, ones, sizeof ones));
  CHECK_OK(ops->copy(made.device, made.streams[0], seen, first->data, sizeof ones));
  CHECK_OK(fdp_pool_give(made.pool, first, made.streams[0]));
  CHECK_OK(fdp_pool_take(made.pool, sizeof ones, made.streams[1], &second));
  CHECK(second == first);
  CHECK_OK(ops->copy(made.device, made.streams[1], second->data, twos, sizeof twos));
  CHECK_OK(fdp_pool_give(made.pool, second, made.streams[1]));
  fdp_pool_trim(made.pool); /* in use still: may not be dropped */
  CHECK_EQUAL(fdp_pool_read_stats(made.pool).idle_count, 1);
  sem_post(&gate);
  CHECK_OK(fdp_pool_take(made.pool, sizeof ones, NULL, &second)); /* waits here */
  CHECK_EQUAL(memcmp(seen, ones, sizeof ones), 0);
  CHECK_EQUAL(memcmp(second->data, twos, sizeof twos), 0);
  CHECK_OK(fdp_pool_give(made.pool, second, NULL));
  fdp_pool_trim(made.pool);
  CHECK_EQUAL(fdp_pool_read_stats(made.pool).idle_count, 0);
  CHECK_EQUAL(fdp_pool_read_stats(made.pool).idle_bytes, 0);
  bench_close(&made);
  sem_destroy(&gate);
}

/* A step that needs more than the bound takes no new memory when it runs again; what no step needs
 * any more goes. */
static void test_bound(void) {
  bench made = bench_open(20000, 3 * 1024);
  fdp_buffer *buffers[5];
  for (int step = 0; step < 3; ++step) {
    for (int i = 0; i < 5; ++i) CHECK_OK(fdp_pool_take(made.pool, 1024, NULL, &buffers[i]));
    for (int i = 0; i < 5; ++i) CHECK_OK(fdp_pool_give(made.pool, buffers[i], NULL));
    CHECK_EQUAL(fdp_pool_read_stats(made.pool).idle_bytes, 5 * 1024);
  }
  CHECK_EQUAL(fdp_pool_read_stats(made.pool).device_takes, 5);
  for (int i = 0; i < FDP_POOL_STALE_GIVES; ++i) {
    CHECK_OK(fdp_pool_take(made.pool, 512, NULL, &buffers[0]));
    CHECK_OK(fdp_pool_give(made.pool, buffers[0], NULL));
  }
  fdp_pool_stats stats = fdp_pool_read_stats(made.pool);
  CHECK_EQUAL(stats.idle_bytes, 2 * 1024 + 512);
  CHECK_EQUAL(stats.device_takes, 6);
  bench_close(&made);
}

static void test_debug_fill(void) {
  bench made = bench_open(20000, INT64_MAX);
  fdp_buffer *buffer = NULL;
  CHECK_OK(fdp_pool_debug_fill(made.pool));
  CHECK_OK(fdp_pool_debug_fill(made.pool));
  CHECK_OK(fdp_pool_take(made.pool, 1000, made.streams[0], &buffer));
  memset(buffer->data, 7, (size_t)buffer->size_bytes);
  unsigned char *bytes = buffer->data;
  int64_t size_bytes = buffer->size_bytes;
  CHECK_OK(fdp_pool_give(made.pool, buffer, made.streams[0]));
  CHECK_OK(fdp_pool_take(made.pool, 1000, NULL, &buffer));
  CHECK(buffer->data == bytes);
  bool filled = true;
  for (int64_t i = 0; i < size_bytes; ++i) filled &= bytes[i] == 0xFF;
  CHECK(filled);
  CHECK_OK(fdp_pool_give(made.pool, buffer, NULL));
  bench_close(&made);
}

static void test_failures(void) {
  bench made = bench_open(30, INT64_MAX);
  fdp_buffer *buffer = NULL, *other = NULL;
  fdp_fault_arm(FDP_FAULT_MEMORY_TAKE, 1);
  CHECK_FAILS(fdp_pool_take(made.pool, 100, NULL, &buffer), FDP_FAULT_INJECTED,
              "memory_take: this call was told to fail");
  for (int64_t nth = 1; nth <= 3; ++nth) { /* the struct, its event, the memory */
    check_fail_allocation(nth);
    CHECK_FAILS(fdp_pool_take(made.pool, 100, NULL, &buffer), FDP_OUT_OF_MEMORY, NULL);
    CHECK(check_allocation_failed());
  }
  CHECK_EQUAL(fdp_pool_read_stats(made.pool).lent_count, 0);
  /* When memory is short, what is idle goes back to the device and the take is tried again. */
  CHECK_OK(fdp_pool_take(made.pool, 100, NULL, &buffer));
  CHECK_OK(fdp_pool_give(made.pool, buffer, NULL));
  check_fail_allocation(3);
  CHECK_OK(fdp_pool_take(made.pool, 5000, NULL, &buffer));
  CHECK(check_allocation_failed());
  CHECK_EQUAL(fdp_pool_read_stats(made.pool).idle_count, 0);
  CHECK_OK(fdp_pool_give(made.pool, buffer, NULL));
  fdp_pool_trim(made.pool);
  /* A buffer whose last use cannot be waited for is lent no more. */
  CHECK_OK(fdp_pool_take(made.pool, 100, made.streams[0], &buffer));
  CHECK_OK(fdp_device_host_enqueue(made.device, made.streams[0], fail, NULL));
  CHECK_OK(fdp_pool_give(made.pool, buffer, made.streams[0]));
  CHECK_FAILS(fdp_pool_take(made.pool, 100, NULL, &other), FDP_DEVICE_ERROR, "on purpose");
  CHECK_OK(fdp_pool_take(made.pool, 100, NULL, &other));
  CHECK(other != buffer);
  check_fail_allocation(1); /* the record */
  CHECK_FAILS(fdp_pool_give(made.pool, other, made.streams[1]), FDP_OUT_OF_MEMORY, NULL);
  CHECK(check_allocation_failed());
  CHECK_EQUAL(fdp_pool_read_stats(made.pool).lent_count, 0);
  CHECK_EQUAL(fdp_pool_read_stats(made.pool).idle_count, 0);
  check_fail_allocation(1);
  fdp_pool *pool = NULL;
  CHECK_FAILS(fdp_pool_open(made.device, 1, &pool), FDP_OUT_OF_MEMORY, "pool: no host memory");
  CHECK(check_allocation_failed());
  bench_close(&made);
}

typedef struct user {
  bench *made;
  int index;
} user;

static void *use_pool(void *argument) {
  user *me = argument;
  fdp_stream *stream = me->index % 3 == 0 ? NULL : me->made->streams[me->index % 2];
  for (int round = 0; round < 300; ++round) {
    fdp_buffer *buffer = NULL;
    CHECK_OK(fdp_pool_take(me->made->pool, 700, stream, &buffer));
    if (!stream) memset(buffer->data, me->index, 700);
    CHECK_OK(fdp_pool_give(me->made->pool, buffer, stream));
  }
  return NULL;
}

/* A taker that asks for depth gets buffers of its own while others are in use, up to the bound; the
 * calling thread always does; and whoever takes one waits for each of its last users. */
static void test_depth(void) {
  bench made = bench_open(20000, INT64_MAX);
  fdp_device *device = made.device;
  fdp_stream_ref first = {device, made.streams[0]}, second = {device, made.streams[1]};
  fdp_stream_ref both[] = {first, second};
  fdp_buffer *buffers[FDP_POOL_DEPTH + 1], *other = NULL;
  sem_t gates[2];
  for (int32_t i = 0; i < 2; ++i) {
    sem_init(&gates[i], 0, 0);
    CHECK_OK(fdp_device_host_enqueue(device, made.streams[i], wait_for_semaphore, &gates[i]));
  }
  for (int64_t i = 0; i <= FDP_POOL_DEPTH; ++i) {
    CHECK_OK(fdp_pool_take_deep(made.pool, 1000, first, &buffers[i]));
    CHECK_OK(fdp_pool_give_many(made.pool, buffers[i], both, 2, FDP_OK));
    CHECK_EQUAL(fdp_pool_read_stats(made.pool).device_takes,
                i < FDP_POOL_DEPTH ? i + 1 : FDP_POOL_DEPTH);
  }
  CHECK(buffers[FDP_POOL_DEPTH] == buffers[0]); /* the one that has been in use longest */
  CHECK_OK(fdp_pool_take_passed(made.pool, 1000, &other));
  CHECK_EQUAL(fdp_pool_read_stats(made.pool).device_takes, FDP_POOL_DEPTH + 1);
  CHECK_OK(fdp_pool_give_many(made.pool, other, NULL, 0, FDP_OK));
  fdp_buffer *again = NULL;
  CHECK_OK(fdp_pool_take_passed(made.pool, 1000, &again));
  CHECK(again == other);
  CHECK_EQUAL(fdp_pool_give_many(made.pool, again, NULL, 0,
                                 fdp_fail(FDP_DEVICE_ERROR, "of the work")), FDP_DEVICE_ERROR);
  CHECK_TEXT(fdp_last_message(), "of the work");
  for (int32_t i = 0; i < 2; ++i) { /* of a large size there is one */
    CHECK_OK(fdp_pool_take_deep(made.pool, FDP_POOL_DEEP_BYTES + 1, first, &buffers[i]));
    CHECK_OK(fdp_pool_give_many(made.pool, buffers[i], &second, 1, FDP_OK));
  }
  CHECK(buffers[0] == buffers[1]);
  fdp_pool_trim(made.pool);
  CHECK_EQUAL(fdp_pool_read_stats(made.pool).idle_count, FDP_POOL_DEPTH + 1);
  sem_post(&gates[0]); /* all but the large one have the other stream as a user too */
  CHECK_OK(fdp_pool_take(made.pool, FDP_POOL_DEEP_BYTES + 1, made.streams[0], &other));
  CHECK_OK(fdp_pool_give(made.pool, other, made.streams[0]));
  fdp_pool_trim(made.pool);
  CHECK_EQUAL(fdp_pool_read_stats(made.pool).idle_count, FDP_POOL_DEPTH + 1);
  sem_post(&gates[1]);
  CHECK_OK(fdp_pool_take(made.pool, 1000, NULL, &other)); /* waits here */
  CHECK_OK(fdp_pool_give(made.pool, other, NULL));
  bench_close(&made);
}

static void test_threads(void) {
  bench made = bench_open(20000, INT64_MAX);
  pthread_t threads[4];
  user users[4];
  for (int i = 0; i < 4; ++i) {
    users[i] = (user){&made, i};
    CHECK_EQUAL(pthread_create(&threads[i], NULL, use_pool, &users[i]), 0);
  }
  for (int i = 0; i < 4; ++i) pthread_join(threads[i], NULL);
  CHECK(fdp_pool_read_stats(made.pool).device_takes <= 4);
  bench_close(&made);
}

/* A lost buffer is neither lent again nor given to the device by a trim; close drops it (which the
 * address sanitizer looks after). */
static void test_lost(void) {
  bench made = bench_open(20000, INT64_MAX);
  fdp_buffer *first = NULL, *second = NULL;
  CHECK_OK(fdp_pool_take(made.pool, 100, made.streams[0], &first));
  void *lost = first->data;
  fdp_pool_lose(made.pool, first);
  fdp_pool_trim(made.pool);
  CHECK_OK(fdp_pool_take(made.pool, 100, made.streams[0], &second));
  CHECK(second->data != lost);
  memset(lost, 1, 100); /* it is there still */
  CHECK_OK(fdp_pool_give(made.pool, second, made.streams[0]));
  fdp_pool_stats stats = fdp_pool_read_stats(made.pool);
  CHECK_EQUAL(stats.lent_count, 0);
  CHECK_EQUAL(stats.lent_bytes, 0);
  CHECK_EQUAL(stats.idle_count, 1);
  CHECK_EQUAL(stats.device_takes, 2);
  bench_close(&made);
}

void test_pool(void) {
  test_sizes();
  test_steady_state();
  test_last_use();
  test_bound();
  test_debug_fill();
  test_failures();
  test_depth();
  test_threads();
  test_lost();
}

/* The hand-off between two threads: order, deadlines, closing, signals. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>

#include "../../csrc/handoff.h"
#include "check.h"
#include "host_work.h"

static void test_states(void) {
  fdp_handoff handoff;
  int first = 1, second = 2;
  void *item = NULL;
  fdp_handoff_init(&handoff);
  int64_t start = now_ms();
  CHECK_FAILS(fdp_handoff_take(&handoff, 30, &item), FDP_TIMED_OUT,
              "handoff: no item within 30 ms");
  CHECK(now_ms() - start >= 30);
  CHECK_FAILS(fdp_handoff_take(&handoff, 0, &item), FDP_TIMED_OUT, NULL);
  CHECK_OK(fdp_handoff_put(&handoff, &first));
  CHECK_FAILS(fdp_handoff_put(&handoff, &second), FDP_INVALID_ARGUMENT,
              "handoff: put, but an item is still in it");
  CHECK_OK(fdp_handoff_take(&handoff, 0, &item));
  CHECK(item == &first);
  CHECK_OK(fdp_handoff_put(&handoff, NULL)); /* items are opaque */
  CHECK_OK(fdp_handoff_take(&handoff, -1, &item));
  CHECK(item == NULL);
  CHECK_OK(fdp_handoff_put(&handoff, &second));
  fdp_handoff_close(&handoff);
  CHECK_FAILS(fdp_handoff_put(&handoff, &first), FDP_ABORTED, "handoff: put, but it was closed");
  CHECK_OK(fdp_handoff_take(&handoff, -1, &item)); /* what was there can still be taken */
  CHECK(item == &second);
  CHECK_FAILS(fdp_handoff_take(&handoff, -1, &item), FDP_ABORTED,
              "handoff: take, but it was closed");
  CHECK_FAILS(fdp_handoff_put(&handoff, &first), FDP_ABORTED, NULL);
  fdp_handoff_close(&handoff);
}

typedef struct pair {
  fdp_handoff there;
  fdp_handoff back;
  atomic_int count;
} pair;

/* Sends every item back, one higher, until it is closed. */
static void *echo(void *argument) {
  pair *both = argument;
  void *item = NULL;
  while (fdp_handoff_take(&both->there, -1, &item) == FDP_OK) {
    *(int64_t *)item += 1;
    atomic_fetch_add(&both->count, 1);
    if (fdp_handoff_put(&both->back, item) != FDP_OK) break;
  }
  return NULL;
}

static void test_round_trips(void) {
  enum { TRIPS = 20000 };
  pair both = {.count = 0};
  fdp_handoff_init(&both.there);
  fdp_handoff_init(&both.back);
  pthread_t thread;
  CHECK_EQUAL(pthread_create(&thread, NULL, echo, &both), 0);
  int64_t value = 0, wrong = 0;
  for (int64_t i = 0; i < TRIPS; ++i) {
    void *item = NULL;
    wrong += fdp_handoff_put(&both.there, &value) != FDP_OK;
    wrong += fdp_handoff_take(&both.back, 20000, &item) != FDP_OK;
    wrong += item != &value || value != i + 1;
    if (i % 1000 == 0) sleep_ms(1); /* now and then the taker is asleep for sure */
  }
  CHECK_EQUAL(wrong, 0);
  fdp_handoff_close(&both.there); /* wakes it where it sleeps for ever */
  pthread_join(thread, NULL);
  CHECK_EQUAL(atomic_load(&both.count), TRIPS);
}

/* A taker that gives up and comes back over and over, against a producer: nothing is lost. */
static void *put_many(void *argument) {
  fdp_handoff *handoff = argument;
  static int64_t items[2000];
  for (int64_t i = 0; i < 2000; ++i) {
    items[i] = i;
    while (fdp_handoff_put(handoff, &items[i]) != FDP_OK) sched_yield();
  }
  return NULL;
}

static void test_impatient_taker(void) {
  fdp_handoff handoff;
  fdp_handoff_init(&handoff);
  pthread_t thread;
  CHECK_EQUAL(pthread_create(&thread, NULL, put_many, &handoff), 0);
  int64_t wrong = 0;
  for (int64_t i = 0; i < 2000; ++i) {
    void *item = NULL;
    fdp_status status;
    do {
      status = fdp_handoff_take(&handoff, i % 2, &item);
    } while (status == FDP_TIMED_OUT);
    wrong += status != FDP_OK || *(int64_t *)item != i;
  }
  CHECK_EQUAL(wrong, 0);
  pthread_join(thread, NULL);
}

static void *close_later(void *handoff) {
  sleep_ms(20);
  fdp_handoff_close(handoff);
  return NULL;
}

static void on_signal(int number) { (void)number; }

static void *signal_later(void *thread) {
  sleep_ms(20);
  pthread_kill(*(pthread_t *)thread, SIGUSR1);
  return NULL;
}

static void test_wakes(void) {
  fdp_handoff handoff;
  fdp_handoff_init(&handoff);
  pthread_t thread, self = pthread_self();
  void *item = NULL;
  struct sigaction action = {.sa_handler = on_signal}, former;
  sigaction(SIGUSR1, &action, &former);
  CHECK_EQUAL(pthread_create(&thread, NULL, signal_later, &self), 0);
  int64_t start = now_ms();
  CHECK_FAILS(fdp_handoff_take(&handoff, 20000, &item), FDP_TIMED_OUT, NULL);
  CHECK(now_ms() - start < 10000);
  pthread_join(thread, NULL);
  sigaction(SIGUSR1, &former, NULL);
  CHECK_EQUAL(pthread_create(&thread, NULL, close_later, &handoff), 0);
  CHECK_FAILS(fdp_handoff_take(&handoff, -1, &item), FDP_ABORTED, NULL);
  pthread_join(thread, NULL);
}

void test_handoff(void) {
  test_states();
  test_round_trips();
  test_impatient_taker();
  test_wakes();
}

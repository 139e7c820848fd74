#include "sim_threads.h"

#include <assert.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include "../../csrc/deadline.h"
#include "sim_inside.h"

#define STACK_BYTES (256 << 10)
#define MAX_LOCKS 1024

typedef struct lock {
  const pthread_mutex_t *mutex;
  bool is_held; /* by a coroutine; for a moment a job of NCCL's may have it */
  sim_clock clock;
} lock;

typedef struct coroutine {
  ucontext_t context;
  void *argument;
  bool is_done;
  const lock *wants; /* NULL: none */
  char message[FDP_MESSAGE_BYTES]; /* each has its last message */
} coroutine;

static _Alignas(64) char stacks[SIM_MAX_THREADS][STACK_BYTES];

static struct {
  sim *world; /* NULL: nothing runs */
  void (*body)(void *argument);
  pthread_t system_thread;
  ucontext_t scheduler;
  coroutine threads[SIM_MAX_THREADS]; /* the first is whoever called */
  int32_t count;
  lock locks[MAX_LOCKS];
  int32_t lock_count;
} all;

int __real_pthread_mutex_lock(pthread_mutex_t *mutex);
int __real_pthread_mutex_unlock(pthread_mutex_t *mutex);
int __wrap_pthread_mutex_lock(pthread_mutex_t *mutex);
int __wrap_pthread_mutex_unlock(pthread_mutex_t *mutex);

/* False for a job of NCCL's, whose caller waits for it. */
static bool is_here(void) {
  return all.world && all.world->thread > 0 && pthread_equal(all.system_thread, pthread_self());
}

/* The buffer of the system thread: fdp_last_message points to it. */
static char *message_buffer(void) { return (char *)(uintptr_t)fdp_last_message(); }

/* What is the thread's own in the core. */
static void switch_out(coroutine *own) {
  snprintf(own->message, sizeof own->message, "%s", fdp_last_message());
  bool is_past = fdp_deadline_or(1) == 0;
  int64_t timeout_ms = fdp_deadline_exchange(0);
  swapcontext(&own->context, &all.scheduler);
  snprintf(message_buffer(), FDP_MESSAGE_BYTES, "%s", own->message);
  fdp_deadline_exchange(timeout_ms);
  if (is_past) fdp_deadline_pass();
}

void sim_yield(sim *world) {
  if (!is_here() || world->spared > 0 || sim_choose(world, 4) != 0) return;
  switch_out(&all.threads[world->thread]);
}

static void start(void) {
  coroutine *own = &all.threads[all.world->thread];
  all.body(own->argument);
  own->is_done = true;
  swapcontext(&own->context, &all.scheduler);
}

/* --- locks --- */

static lock *lock_of(const pthread_mutex_t *mutex) {
  for (int32_t i = 0; i < all.lock_count; ++i) {
    if (all.locks[i].mutex == mutex) return &all.locks[i];
  }
  assert(all.lock_count < MAX_LOCKS);
  all.locks[all.lock_count] = (lock){.mutex = mutex};
  return &all.locks[all.lock_count++];
}

int __wrap_pthread_mutex_lock(pthread_mutex_t *mutex) {
  if (!is_here()) return __real_pthread_mutex_lock(mutex);
  coroutine *own = &all.threads[all.world->thread];
  lock *wanted = lock_of(mutex);
  while (wanted->is_held) {
    own->wants = wanted;
    switch_out(own);
  }
  own->wants = NULL;
  wanted->is_held = true;
  sim_clock_merge(&all.world->threads[all.world->thread], &wanted->clock);
  return __real_pthread_mutex_lock(mutex);
}

int __wrap_pthread_mutex_unlock(pthread_mutex_t *mutex) {
  if (is_here()) {
    lock *held = lock_of(mutex);
    held->is_held = false;
    sim_clock_merge(&held->clock, &all.world->threads[all.world->thread]);
  }
  return __real_pthread_mutex_unlock(mutex);
}

/* --- the scheduler --- */

static bool can_run(const coroutine *thread) {
  return !thread->is_done && !(thread->wants && thread->wants->is_held);
}

static int32_t pick(sim *world) {
  int32_t ready[SIM_MAX_THREADS], count = 0, living = 0;
  for (int32_t t = 1; t <= all.count; ++t) {
    living += !all.threads[t].is_done;
    if (can_run(&all.threads[t])) ready[count++] = t;
  }
  if (count > 0) return ready[sim_choose(world, (uint64_t)count)];
  if (living == 0) return 0;
  fprintf(stderr, "deadlock: every host thread waits for a lock\n");
  abort();
}

void sim_threads_run(sim *world, void (*body)(void *argument), void *const *arguments,
                     int32_t count) {
  assert(count < SIM_MAX_THREADS && !all.world && world->thread == 0);
  all.world = world;
  all.body = body;
  all.system_thread = pthread_self();
  all.count = count;
  all.lock_count = 0;
  world->yield = sim_yield;
  for (int32_t t = 1; t <= count; ++t) {
    coroutine *thread = &all.threads[t];
    thread->argument = arguments[t - 1];
    thread->is_done = false;
    thread->wants = NULL;
    thread->message[0] = '\0';
    getcontext(&thread->context);
    thread->context.uc_stack.ss_sp = stacks[t];
    thread->context.uc_stack.ss_size = STACK_BYTES;
    thread->context.uc_link = NULL;
    makecontext(&thread->context, start, 0);
    sim_clock_merge(&world->threads[t], &world->threads[0]);
  }
  for (int32_t next = pick(world); next > 0; next = pick(world)) {
    world->thread = next;
    sim_trace(world, 't', next, 0, 0);
    swapcontext(&all.scheduler, &all.threads[next].context);
    world->thread = 0;
  }
  for (int32_t t = 1; t <= count; ++t) sim_clock_merge(&world->threads[0], &world->threads[t]);
  world->yield = NULL;
  all.world = NULL;
}

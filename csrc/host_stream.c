#include "host_stream.h"

#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"

/* How often a wait looks at its abort flag. */
#define ABORT_LOOK_MS 5

/* Note "records". An event stands for its latest record only, while waits made before keep the one
 * they saw. So a record is a thing of its own, shared by the event, the stream that will pass it
 * and everyone who waits for it; the last of them frees it. An event without one has passed. */
typedef struct host_record {
  pthread_mutex_t mutex;
  pthread_cond_t passed_cond;
  bool passed;
  fdp_status status;   /* of the stream when it passed */
  fdp_message message; /* set when status is not FDP_OK */
  atomic_int references;
} host_record;

struct fdp_event {
  pthread_mutex_t mutex; /* guards record */
  host_record *record;
};

struct fdp_stream {
  fdp_device_host_options options;
  pthread_t thread;
  pthread_mutex_t mutex; /* guards all below */
  pthread_cond_t changed;
  host_task *first;
  host_task *last;
  bool closing;   /* no more tasks come; the thread ends when the queue is empty */
  bool ended;     /* the thread will touch the stream no more */
  bool abandoned; /* nobody waits for the thread: it frees the stream itself */
  int stop;       /* written and read atomically: waits inside the stream end early */
  /* Only the stream's thread: */
  fdp_status status;
  fdp_message message; /* of the status */
};

static bool is_before(const struct timespec *a, const struct timespec *b) {
  return a->tv_sec != b->tv_sec ? a->tv_sec < b->tv_sec : a->tv_nsec < b->tv_nsec;
}

static bool is_raised(const volatile int *flag) {
  return flag && __atomic_load_n(flag, __ATOMIC_RELAXED) != 0;
}

/* --- records --- */

static host_record *record_open(void) {
  host_record *record = calloc(1, sizeof *record);
  if (!record) return NULL;
  pthread_mutex_init(&record->mutex, NULL);
  fdp_clock_cond_init(&record->passed_cond);
  atomic_init(&record->references, 1);
  return record;
}

static host_record *record_hold(host_record *record) {
  if (record) atomic_fetch_add_explicit(&record->references, 1, memory_order_relaxed);
  return record;
}

static void record_drop(host_record *record) {
  if (!record) return;
  if (atomic_fetch_sub_explicit(&record->references, 1, memory_order_acq_rel) != 1) return;
  pthread_cond_destroy(&record->passed_cond);
  pthread_mutex_destroy(&record->mutex);
  free(record);
}

static void record_pass(host_record *record, fdp_status status, const fdp_message *message) {
  pthread_mutex_lock(&record->mutex);
  record->passed = true;
  record->status = status;
  if (status != FDP_OK) record->message = *message;
  pthread_cond_broadcast(&record->passed_cond);
  pthread_mutex_unlock(&record->mutex);
}

static fdp_status record_wait(host_record *record, int64_t timeout_ms,
                              const volatile int *abort_flag, const volatile int *stop) {
  if (!record) return FDP_OK;
  struct timespec deadline = fdp_clock_after_ms(timeout_ms);
  fdp_status status = FDP_OK;
  pthread_mutex_lock(&record->mutex);
  while (!record->passed && status == FDP_OK) {
    struct timespec look = fdp_clock_after_ms(ABORT_LOOK_MS);
    bool is_last = !is_before(&look, &deadline);
    int error = pthread_cond_timedwait(&record->passed_cond, &record->mutex,
                                       is_last ? &deadline : &look);
    if (record->passed) break;
    if (is_raised(abort_flag) || is_raised(stop)) {
      status = fdp_fail(FDP_ABORTED, "host: a wait for an event was told to stop");
    } else if (error == ETIMEDOUT && is_last) {
      status = fdp_fail(FDP_TIMED_OUT, "host: an event did not pass within %" PRId64 " ms",
                        timeout_ms);
    }
  }
  if (record->passed && record->status != FDP_OK) {
    status = record->status;
    fdp_message_restore(&record->message);
  }
  pthread_mutex_unlock(&record->mutex);
  return status;
}

static host_record *event_hold_record(fdp_event *event) {
  pthread_mutex_lock(&event->mutex);
  host_record *record = record_hold(event->record);
  pthread_mutex_unlock(&event->mutex);
  return record;
}

/* --- streams --- */

static void stream_free(fdp_stream *stream) {
  pthread_cond_destroy(&stream->changed);
  pthread_mutex_destroy(&stream->mutex);
  free(stream);
}

static void *stream_main(void *argument) {
  fdp_stream *stream = argument;
  pthread_mutex_lock(&stream->mutex);
  for (;;) {
    while (!stream->first && !stream->closing) {
      pthread_cond_wait(&stream->changed, &stream->mutex);
    }
    host_task *task = stream->first;
    if (!task) break;
    stream->first = task->next;
    if (!stream->first) stream->last = NULL;
    pthread_mutex_unlock(&stream->mutex);
    fdp_status status = task->run(stream, task->arguments);
    if (status != FDP_OK && stream->status == FDP_OK) {
      stream->status = status;
      fdp_message_keep(&stream->message);
    }
    free(task);
    pthread_mutex_lock(&stream->mutex);
  }
  stream->ended = true;
  bool abandoned = stream->abandoned;
  pthread_cond_broadcast(&stream->changed);
  pthread_mutex_unlock(&stream->mutex);
  if (abandoned) stream_free(stream);
  return NULL;
}

fdp_status host_stream_open(const fdp_device_host_options *options, fdp_stream **stream) {
  fdp_stream *opened = calloc(1, sizeof *opened);
  if (!opened) return fdp_fail(FDP_OUT_OF_MEMORY, "host: no memory for a stream");
  opened->options = *options;
  pthread_mutex_init(&opened->mutex, NULL);
  fdp_clock_cond_init(&opened->changed);
  int error = pthread_create(&opened->thread, NULL, stream_main, opened);
  if (error != 0) {
    stream_free(opened);
    return fdp_fail(FDP_DEVICE_ERROR, "host: no thread for a stream (error %d)", error);
  }
  *stream = opened;
  return FDP_OK;
}

void host_stream_close(fdp_stream *stream) {
  if (!stream) return;
  struct timespec deadline = fdp_clock_after_ms(stream->options.timeout_ms);
  pthread_mutex_lock(&stream->mutex);
  stream->closing = true;
  pthread_cond_broadcast(&stream->changed);
  int error = 0;
  while (!stream->ended && error == 0) {
    error = pthread_cond_timedwait(&stream->changed, &stream->mutex, &deadline);
  }
  bool ended = stream->ended;
  pthread_t thread = stream->thread; /* once abandoned, the stream may go at any moment */
  if (!ended) {
    stream->abandoned = true;
    __atomic_store_n(&stream->stop, 1, __ATOMIC_RELAXED);
  }
  pthread_mutex_unlock(&stream->mutex);
  if (ended) {
    pthread_join(thread, NULL);
    stream_free(stream);
  } else {
    pthread_detach(thread);
  }
}

fdp_status host_task_open(host_task_run *run, size_t size_bytes, host_task **task) {
  host_task *opened = malloc(sizeof *opened + size_bytes);
  if (!opened) return fdp_fail(FDP_OUT_OF_MEMORY, "host: no memory to enqueue work on a stream");
  opened->next = NULL;
  opened->run = run;
  *task = opened;
  return FDP_OK;
}

void host_stream_push(fdp_stream *stream, host_task *task) {
  pthread_mutex_lock(&stream->mutex);
  if (stream->last) {
    stream->last->next = task;
  } else {
    stream->first = task;
  }
  stream->last = task;
  pthread_cond_signal(&stream->changed);
  pthread_mutex_unlock(&stream->mutex);
}

fdp_status host_stream_status(const fdp_stream *stream) { return stream->status; }

/* --- events --- */

fdp_status host_event_open(fdp_event **event) {
  fdp_event *opened = calloc(1, sizeof *opened);
  if (!opened) return fdp_fail(FDP_OUT_OF_MEMORY, "host: no memory for an event");
  pthread_mutex_init(&opened->mutex, NULL);
  *event = opened;
  return FDP_OK;
}

void host_event_close(fdp_event *event) {
  if (!event) return;
  record_drop(event->record);
  pthread_mutex_destroy(&event->mutex);
  free(event);
}

static fdp_status run_pass(fdp_stream *stream, void *arguments) {
  host_record *record = *(host_record **)arguments;
  record_pass(record, stream->status, &stream->message);
  record_drop(record);
  return FDP_OK;
}

fdp_status host_event_record(fdp_event *event, fdp_stream *stream) {
  host_record *record = NULL;
  if (stream) {
    host_task *task = NULL;
    fdp_status status = host_task_open(run_pass, sizeof record, &task);
    if (status != FDP_OK) return status;
    record = record_open();
    if (!record) {
      free(task);
      return fdp_fail(FDP_OUT_OF_MEMORY, "host: no memory to record an event");
    }
    memcpy(task->arguments, &record, sizeof record);
    record_hold(record); /* the task's */
    host_stream_push(stream, task);
  }
  pthread_mutex_lock(&event->mutex);
  host_record *replaced = event->record;
  event->record = record;
  pthread_mutex_unlock(&event->mutex);
  record_drop(replaced);
  return FDP_OK;
}

static fdp_status run_wait(fdp_stream *stream, void *arguments) {
  host_record *record = *(host_record **)arguments;
  fdp_status status = record_wait(record, stream->options.timeout_ms, stream->options.abort_flag,
                                  &stream->stop);
  record_drop(record);
  return status;
}

fdp_status host_stream_wait(const fdp_device_host_options *options, fdp_stream *stream,
                            fdp_event *event) {
  if (!stream) return host_event_synchronize(event, options->timeout_ms, options->abort_flag);
  host_record *record = event_hold_record(event);
  if (!record) return FDP_OK;
  host_task *task = NULL;
  fdp_status status = host_task_open(run_wait, sizeof record, &task);
  if (status != FDP_OK) {
    record_drop(record);
    return status;
  }
  memcpy(task->arguments, &record, sizeof record); /* the hold goes with it */
  host_stream_push(stream, task);
  return FDP_OK;
}

fdp_status host_event_query(fdp_event *event, bool *passed) {
  host_record *record = event_hold_record(event);
  fdp_status status = FDP_OK;
  *passed = true;
  if (record) {
    pthread_mutex_lock(&record->mutex);
    *passed = record->passed;
    if (record->passed && record->status != FDP_OK) {
      status = record->status;
      fdp_message_restore(&record->message);
    }
    pthread_mutex_unlock(&record->mutex);
  }
  record_drop(record);
  return status;
}

fdp_status host_event_synchronize(fdp_event *event, int64_t timeout_ms,
                                  const volatile int *abort_flag) {
  host_record *record = event_hold_record(event);
  fdp_status status = record_wait(record, timeout_ms, abort_flag, NULL);
  record_drop(record);
  return status;
}

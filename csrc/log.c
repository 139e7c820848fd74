#include "log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>

#include "env.h"
#include "limits.h"

static struct {
  pthread_mutex_t mutex; /* guards sink and user; never held while the sink runs */
  fdp_log_sink sink;
  void *user;
  atomic_int level;
} log_state = {.mutex = PTHREAD_MUTEX_INITIALIZER};

/* In a child of fork, which may have copied the mutex locked by a thread that it has not. */
static void forget_holder(void) { pthread_mutex_init(&log_state.mutex, NULL); }

static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_holder); }

void fdp_log_open(fdp_log_sink sink, void *user, fdp_log_level level) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, watch_forks);
  pthread_mutex_lock(&log_state.mutex);
  log_state.sink = sink;
  log_state.user = user;
  atomic_store_explicit(&log_state.level, sink ? (int)level : FDP_LOG_OFF, memory_order_relaxed);
  pthread_mutex_unlock(&log_state.mutex);
}

fdp_status fdp_log_level_from_env(fdp_log_level *level) {
  int32_t choice = 0;
  fdp_status status = fdp_env_choice(FDP_ENV_LOG, &choice);
  if (status == FDP_OK) *level = (fdp_log_level)choice; /* the table lists the levels in order */
  return status;
}

bool fdp_log_enabled(fdp_log_level level) {
  return level != FDP_LOG_OFF &&
         (int)level <= atomic_load_explicit(&log_state.level, memory_order_relaxed);
}

void fdp_log(fdp_log_level level, const char *format, ...) {
  if (!fdp_log_enabled(level)) return;
  char message[FDP_MESSAGE_BYTES];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  pthread_mutex_lock(&log_state.mutex);
  fdp_log_sink sink = log_state.sink;
  void *user = log_state.user;
  pthread_mutex_unlock(&log_state.mutex);
  if (!sink) return;
  fdp_message last; /* a sink runs anybody's code, which may fail on this thread */
  fdp_message_keep(&last);
  sink(user, level, message);
  fdp_message_restore(&last);
}

const char *fdp_log_level_name(fdp_log_level level) {
  return fdp_env_choice_name(FDP_ENV_LOG, (int32_t)level);
}

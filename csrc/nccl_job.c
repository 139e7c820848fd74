#include "nccl_job.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>

#include "clock.h"

void fdp_nccl_job_prepare(fdp_nccl_job *job, fdp_status (*run)(fdp_nccl_job *job)) {
  *job = (fdp_nccl_job){.run = run};
  pthread_mutex_init(&job->mutex, NULL);
  fdp_clock_cond_init(&job->ended);
}

void fdp_nccl_job_drop(fdp_nccl_job *job) {
  pthread_cond_destroy(&job->ended);
  pthread_mutex_destroy(&job->mutex);
  free(job);
}

bool fdp_nccl_job_enter(fdp_nccl_job *job) {
  pthread_mutex_lock(&job->mutex);
  if (!job->is_abandoned) return true;
  pthread_mutex_unlock(&job->mutex);
  return false;
}

void fdp_nccl_job_leave(fdp_nccl_job *job) { pthread_mutex_unlock(&job->mutex); }

static void *thread_main(void *argument) {
  fdp_nccl_job *job = argument;
  fdp_status status = job->run(job);
  pthread_mutex_lock(&job->mutex);
  job->status = status;
  fdp_message_keep(&job->message);
  job->has_ended = true;
  bool is_abandoned = job->is_abandoned;
  pthread_cond_signal(&job->ended);
  pthread_mutex_unlock(&job->mutex);
  if (is_abandoned) fdp_nccl_job_drop(job);
  return NULL;
}

/* With all signals blocked: a handler may not end up inside NCCL. */
static fdp_status start(fdp_nccl_job *job, pthread_t *thread) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int code = pthread_create(thread, NULL, thread_main, job);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (code == 0) return FDP_OK;
  return fdp_fail(FDP_OUT_OF_MEMORY, "nccl: no thread could be started (error %d)", code);
}

bool fdp_nccl_job_run(fdp_nccl_job *job, int64_t timeout_ms, fdp_status *status) {
  pthread_t thread;
  *status = start(job, &thread);
  if (*status != FDP_OK) return true;
  struct timespec until = fdp_clock_after_ms(timeout_ms);
  pthread_mutex_lock(&job->mutex);
  int code = 0;
  while (!job->has_ended && code != ETIMEDOUT) {
    code = pthread_cond_timedwait(&job->ended, &job->mutex, &until);
  }
  bool has_ended = job->has_ended;
  job->is_abandoned = !has_ended;
  pthread_mutex_unlock(&job->mutex);
  if (!has_ended) {
    pthread_detach(thread);
    return false;
  }
  pthread_join(thread, NULL);
  *status = job->status;
  if (*status != FDP_OK) fdp_message_restore(&job->message);
  return true;
}

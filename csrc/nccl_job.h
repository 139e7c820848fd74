/* A job: work inside NCCL that may never come back, such as opening communicators over a network
 * that swallows packets. It runs on a thread of its own while the caller waits with a deadline.
 * When that passes the thread is abandoned: it may sit in NCCL for ever, but touches nothing else
 * of fastdp any more. Does nothing to streams itself. */
#ifndef FDP_NCCL_JOB_H
#define FDP_NCCL_JOB_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "status.h"

/* Begins the struct of each kind of job, which is made by malloc and reaches nothing that the
 * caller may free or change, but between fdp_nccl_job_enter and fdp_nccl_job_leave. */
typedef struct fdp_nccl_job {
  fdp_status (*run)(struct fdp_nccl_job *job);
  pthread_mutex_t mutex; /* guards all below */
  pthread_cond_t ended;
  bool has_ended;
  bool is_abandoned;
  fdp_status status;
  fdp_message message; /* of the status */
} fdp_nccl_job;

void fdp_nccl_job_prepare(fdp_nccl_job *job, fdp_status (*run)(fdp_nccl_job *job));
/* Runs it. True if it ended in time: `status` is what it came to, with the calling thread's
 * message, and the job is the caller's again, to drop. Else false: the job is lost, and is freed
 * when it ends after all. */
bool fdp_nccl_job_run(fdp_nccl_job *job, int64_t timeout_ms, fdp_status *status);
void fdp_nccl_job_drop(fdp_nccl_job *job);

/* For `run`: what lies between them may use memory that the caller lent. False, and nothing to
 * leave, if the job was abandoned: then it returns at once. What is done there must be short. */
bool fdp_nccl_job_enter(fdp_nccl_job *job);
void fdp_nccl_job_leave(fdp_nccl_job *job);

#endif

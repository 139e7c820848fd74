#include "nccl_comms.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "nccl_job.h"

/* NCCL's channels on one GPU, shared by the ranks on it. */
#define SHARED_CTAS 16

/* A job on all communicators, with copies of all that it reaches. */
typedef struct comms_job {
  fdp_nccl_job base;
  fdp_nccl nccl;
  const char *what;
  fdp_nccl_comms comms; /* of which `nccl` is the table */
  fdp_nccl_act *acts;   /* of a group; in the same block of memory */
  int32_t act_count;
} comms_job;

static fdp_status fail(const fdp_nccl_comms *comms, int32_t seat, int result, const char *what) {
  const fdp_nccl *nccl = comms->nccl;
  char devices[200];
  bool is_one = seat >= 0;
  const char *last = nccl->get_last_error ? nccl->get_last_error(NULL) : NULL;
  fdp_nccl_devices_text(is_one ? &comms->devices[seat] : comms->devices,
                        is_one ? 1 : comms->count, devices, sizeof devices);
  return fdp_fail(FDP_DEVICE_ERROR, "nccl: %s %s: %s%s%.400s", what, devices,
                  nccl->get_error_string(result), last && *last ? ": " : "", last ? last : "");
}

/* --- groups --- */

static int launch(const fdp_nccl_comms *comms, const fdp_nccl_act *act) {
  const fdp_nccl *nccl = comms->nccl;
  fdp_nccl_comm *comm = comms->handles[act->seat];
  size_t count_elems = (size_t)act->count_elems;
  int dtype = act->dtype, peer = act->peer;
  switch (act->verb) {
    case FDP_NCCL_BROADCAST:
      return nccl->broadcast(act->source, act->target, count_elems, dtype, peer, comm,
                             act->stream);
    case FDP_NCCL_REDUCE:
      return nccl->reduce(act->source, act->target, count_elems, dtype, FDP_NCCL_SUM, peer, comm,
                          act->stream);
    case FDP_NCCL_SEND:
      return nccl->send(act->source, count_elems, dtype, peer, comm, act->stream);
    case FDP_NCCL_RECV:
      return nccl->recv(act->target, count_elems, dtype, peer, comm, act->stream);
  }
  return FDP_NCCL_INVALID_USAGE;
}

/* A group that was started is ended, whatever happened in it. */
static int run_group(const fdp_nccl_comms *comms, const fdp_nccl_act *acts, int32_t act_count) {
  int result = comms->nccl->group_start();
  if (result != FDP_NCCL_SUCCESS) return result;
  for (int32_t i = 0; i < act_count && result == FDP_NCCL_SUCCESS; ++i) {
    result = launch(comms, &acts[i]);
  }
  int ended = comms->nccl->group_end();
  return result != FDP_NCCL_SUCCESS ? result : ended;
}

fdp_status fdp_nccl_comms_run(const fdp_nccl_comms *comms, const char *what,
                              const fdp_nccl_act *acts, int32_t act_count) {
  int result = run_group(comms, acts, act_count);
  return result == FDP_NCCL_SUCCESS ? FDP_OK : fail(comms, -1, result, what);
}

fdp_status fdp_nccl_comms_check(const fdp_nccl_comms *comms) {
  for (int32_t i = 0; i < comms->count; ++i) {
    int found = FDP_NCCL_SUCCESS;
    int result = comms->nccl->comm_get_async_error(comms->handles[i], &found);
    if (result == FDP_NCCL_SUCCESS) result = found;
    if (result == FDP_NCCL_SUCCESS) continue;
    return fail(comms, i, result, "an earlier operation failed on");
  }
  return FDP_OK;
}

/* --- jobs --- */

static comms_job *job_open(const fdp_nccl_comms *comms, const char *what,
                           fdp_status (*run)(fdp_nccl_job *job), const fdp_nccl_act *acts,
                           int32_t act_count) {
  size_t acts_bytes = (size_t)act_count * sizeof *acts;
  comms_job *job = malloc(sizeof *job + acts_bytes);
  if (!job) {
    fdp_fail(FDP_OUT_OF_MEMORY, "nccl: no host memory for %s", what);
    return NULL;
  }
  fdp_nccl_job_prepare(&job->base, run);
  job->nccl = *comms->nccl;
  job->what = what;
  job->comms = *comms;
  job->comms.nccl = &job->nccl;
  job->acts = (fdp_nccl_act *)(void *)(job + 1);
  if (act_count > 0) memcpy(job->acts, acts, acts_bytes);
  job->act_count = act_count;
  return job;
}

/* The job is gone afterwards but for its copy of the communicators. */
static fdp_status job_finish(comms_job *job, int64_t timeout_ms, fdp_nccl_comm **handles) {
  fdp_status status;
  char devices[200];
  const char *what = job->what;
  fdp_nccl_devices_text(job->comms.devices, job->comms.count, devices, sizeof devices);
  if (!fdp_nccl_job_run(&job->base, timeout_ms, &status)) {
    return fdp_fail(FDP_TIMED_OUT, "nccl: %s %s: not done within %" PRId64 " ms", what, devices,
                    timeout_ms);
  }
  if (handles) memcpy(handles, job->comms.handles, sizeof job->comms.handles);
  fdp_nccl_job_drop(&job->base);
  return status;
}

static fdp_status give_up(comms_job *job, int result) {
  if (!fdp_nccl_job_enter(&job->base)) return FDP_ABORTED;
  fdp_status status = fail(&job->comms, -1, result, job->what);
  fdp_nccl_job_leave(&job->base);
  return status;
}

static fdp_status run_acts(fdp_nccl_job *base) {
  comms_job *job = (comms_job *)base;
  int result = run_group(&job->comms, job->acts, job->act_count);
  return result == FDP_NCCL_SUCCESS ? FDP_OK : give_up(job, result);
}

fdp_status fdp_nccl_comms_run_within(const fdp_nccl_comms *comms, const char *what,
                                     const fdp_nccl_act *acts, int32_t act_count,
                                     int64_t timeout_ms) {
  comms_job *job = job_open(comms, what, run_acts, acts, act_count);
  return job ? job_finish(job, timeout_ms, NULL) : FDP_OUT_OF_MEMORY;
}

/* --- making and ending --- */

static int32_t ranks_on(const fdp_nccl_comms *comms, const fdp_device *device) {
  int32_t count = 0;
  for (int32_t i = 0; i < comms->count; ++i) count += comms->devices[i] == device;
  return count;
}

static fdp_status init_rank(comms_job *job, fdp_nccl_id id, int32_t rank, int *result) {
  fdp_nccl_comms *comms = &job->comms;
  fdp_nccl_config config = FDP_NCCL_CONFIG;
  if (!fdp_nccl_job_enter(&job->base)) return FDP_ABORTED;
  fdp_device *device = comms->devices[rank];
  int32_t sharers = ranks_on(comms, device);
  fdp_status status = device->ops->make_current(device);
  fdp_nccl_job_leave(&job->base);
  if (status != FDP_OK) return status;
  if (sharers > 1) config.max_ctas = sharers < SHARED_CTAS ? SHARED_CTAS / sharers : 1;
  *result = job->nccl.comm_init_rank_config(&comms->handles[rank], comms->count, id, rank,
                                            &config);
  return FDP_OK;
}

static fdp_status run_init(fdp_nccl_job *base) {
  comms_job *job = (comms_job *)base;
  fdp_nccl_comms *comms = &job->comms;
  fdp_nccl_id id;
  int result = job->nccl.get_unique_id(&id);
  if (result == FDP_NCCL_SUCCESS) result = job->nccl.group_start();
  if (result != FDP_NCCL_SUCCESS) return give_up(job, result);
  for (int32_t i = 0; i < comms->count && result == FDP_NCCL_SUCCESS; ++i) {
    fdp_status status = init_rank(job, id, i, &result);
    /* To end a group that lacks ranks would wait for them: it ends with this thread instead. */
    if (status != FDP_OK) return status;
  }
  int ended = job->nccl.group_end();
  if (result == FDP_NCCL_SUCCESS) result = ended;
  fdp_status status = result == FDP_NCCL_SUCCESS ? FDP_OK : give_up(job, result);
  bool is_wanted = status == FDP_OK && fdp_nccl_job_enter(base);
  if (is_wanted) fdp_nccl_job_leave(base);
  for (int32_t i = 0; i < comms->count && !is_wanted; ++i) {
    if (comms->handles[i]) (void)job->nccl.comm_abort(comms->handles[i]);
  }
  return status;
}

static fdp_status run_abort(fdp_nccl_job *base) {
  comms_job *job = (comms_job *)base;
  for (int32_t i = 0; i < job->comms.count; ++i) (void)job->nccl.comm_abort(job->comms.handles[i]);
  return FDP_OK;
}

static fdp_status run_destroy(fdp_nccl_job *base) {
  comms_job *job = (comms_job *)base;
  for (int32_t i = 0; i < job->comms.count; ++i) {
    (void)job->nccl.comm_destroy(job->comms.handles[i]);
  }
  return FDP_OK;
}

fdp_status fdp_nccl_comms_make(fdp_nccl_comms *comms, int64_t timeout_ms) {
  comms_job *job = job_open(comms, "making communicators for", run_init, NULL, 0);
  return job ? job_finish(job, timeout_ms, comms->handles) : FDP_OUT_OF_MEMORY;
}

fdp_status fdp_nccl_comms_end(const fdp_nccl_comms *comms, bool aborts, int64_t timeout_ms) {
  comms_job *job = job_open(comms, aborts ? "aborting on" : "closing on",
                            aborts ? run_abort : run_destroy, NULL, 0);
  return job ? job_finish(job, timeout_ms, NULL) : FDP_OUT_OF_MEMORY;
}

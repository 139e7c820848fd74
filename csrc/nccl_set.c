#include "nccl_set.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "log.h"
#include "nccl_job.h"

/* NCCL's channels on one GPU, shared by the ranks on it. */
#define SHARED_CTAS 16
/* Places of FDP_ALIGNMENT_BYTES in the probe of a seat. */
enum { PROBE_BROADCAST, PROBE_ADDEND, PROBE_SUM, PROBE_SENT, PROBE_GOT };

struct fdp_nccl_set {
  const fdp_nccl *nccl;
  int32_t count;
  fdp_device *devices[FDP_NCCL_MAX_SEATS];
  fdp_nccl_comm *comms[FDP_NCCL_MAX_SEATS];
  fdp_stream *lanes[FDP_NCCL_MAX_SEATS];
  char *probes[FDP_NCCL_MAX_SEATS];
  fdp_event *last_uses[FDP_NCCL_MAX_SEATS]; /* recorded after each group */
  bool is_held[FDP_NCCL_MAX_SEATS]; /* the event is its lane's: its next group waits for it */
  bool is_connected[FDP_NCCL_MAX_SEATS]; /* with this one as home */
  bool is_stuck; /* a device did not finish while it was connected */
};

/* A job on a whole set, with copies of all that it reaches. */
typedef struct set_job {
  fdp_nccl_job base;
  fdp_nccl nccl;
  const char *what;
  fdp_nccl_set set; /* a copy */
  fdp_nccl_act *acts; /* of a group; in the same block of memory */
  int32_t act_count;
} set_job;

static fdp_status fail(const fdp_nccl *nccl, const fdp_nccl_set *set, int32_t seat, int result,
                       const char *what) {
  char devices[200];
  bool is_one = seat >= 0;
  const char *last = nccl->get_last_error ? nccl->get_last_error(NULL) : NULL;
  fdp_nccl_devices_text(is_one ? &set->devices[seat] : set->devices, is_one ? 1 : set->count,
                        devices, sizeof devices);
  return fdp_fail(FDP_DEVICE_ERROR, "nccl: %s %s: %s%s%.400s", what, devices,
                  nccl->get_error_string(result), last && *last ? ": " : "", last ? last : "");
}

static int launch(const fdp_nccl *nccl, const fdp_nccl_set *set, const fdp_nccl_act *act) {
  fdp_nccl_comm *comm = set->comms[act->seat];
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
static int run_group(const fdp_nccl *nccl, const fdp_nccl_set *set, const fdp_nccl_act *acts,
                     int32_t act_count) {
  int result = nccl->group_start();
  if (result != FDP_NCCL_SUCCESS) return result;
  for (int32_t i = 0; i < act_count && result == FDP_NCCL_SUCCESS; ++i) {
    result = launch(nccl, set, &acts[i]);
  }
  int ended = nccl->group_end();
  return result != FDP_NCCL_SUCCESS ? result : ended;
}

/* --- jobs --- */

static set_job *job_open(const fdp_nccl_set *set, const char *what,
                         fdp_status (*run)(fdp_nccl_job *job), int32_t act_count) {
  set_job *job = malloc(sizeof *job + (size_t)act_count * sizeof *job->acts);
  if (!job) {
    fdp_fail(FDP_OUT_OF_MEMORY, "nccl: no host memory for %s", what);
    return NULL;
  }
  fdp_nccl_job_prepare(&job->base, run);
  job->nccl = *set->nccl;
  job->what = what;
  job->set = *set;
  job->acts = (fdp_nccl_act *)(void *)(job + 1);
  job->act_count = act_count;
  return job;
}

/* The job is gone afterwards but for its copy of the communicators. */
static fdp_status job_finish(set_job *job, int64_t timeout_ms, fdp_nccl_comm **comms) {
  fdp_status status;
  char devices[200];
  const char *what = job->what;
  fdp_nccl_devices_text(job->set.devices, job->set.count, devices, sizeof devices);
  if (!fdp_nccl_job_run(&job->base, timeout_ms, &status)) {
    return fdp_fail(FDP_TIMED_OUT, "nccl: %s %s: not done within %" PRId64 " ms", what, devices,
                    timeout_ms);
  }
  if (comms) memcpy(comms, job->set.comms, sizeof job->set.comms);
  fdp_nccl_job_drop(&job->base);
  return status;
}

static int32_t ranks_on(const fdp_nccl_set *set, const fdp_device *device) {
  int32_t count = 0;
  for (int32_t i = 0; i < set->count; ++i) count += set->devices[i] == device;
  return count;
}

static fdp_status give_up(set_job *job, int result) {
  if (!fdp_nccl_job_enter(&job->base)) return FDP_ABORTED;
  fdp_status status = fail(&job->nccl, &job->set, -1, result, job->what);
  fdp_nccl_job_leave(&job->base);
  return status;
}

static fdp_status init_rank(set_job *job, fdp_nccl_id id, int32_t rank, int *result) {
  fdp_nccl_config config = FDP_NCCL_CONFIG;
  if (!fdp_nccl_job_enter(&job->base)) return FDP_ABORTED;
  fdp_device *device = job->set.devices[rank];
  int32_t sharers = ranks_on(&job->set, device);
  fdp_status status = device->ops->make_current(device);
  fdp_nccl_job_leave(&job->base);
  if (status != FDP_OK) return status;
  if (sharers > 1) config.max_ctas = sharers < SHARED_CTAS ? SHARED_CTAS / sharers : 1;
  *result =
      job->nccl.comm_init_rank_config(&job->set.comms[rank], job->set.count, id, rank, &config);
  return FDP_OK;
}

static fdp_status run_init(fdp_nccl_job *base) {
  set_job *job = (set_job *)base;
  fdp_nccl_set *set = &job->set;
  fdp_nccl_id id;
  int result = job->nccl.get_unique_id(&id);
  if (result == FDP_NCCL_SUCCESS) result = job->nccl.group_start();
  if (result != FDP_NCCL_SUCCESS) return give_up(job, result);
  for (int32_t i = 0; i < set->count && result == FDP_NCCL_SUCCESS; ++i) {
    fdp_status status = init_rank(job, id, i, &result);
    /* To end a group that lacks ranks would wait for them: it ends with this thread instead. */
    if (status != FDP_OK) return status;
  }
  int ended = job->nccl.group_end();
  if (result == FDP_NCCL_SUCCESS) result = ended;
  fdp_status status = result == FDP_NCCL_SUCCESS ? FDP_OK : give_up(job, result);
  bool is_wanted = status == FDP_OK && fdp_nccl_job_enter(base);
  if (is_wanted) fdp_nccl_job_leave(base);
  for (int32_t i = 0; i < set->count && !is_wanted; ++i) {
    if (set->comms[i]) (void)job->nccl.comm_abort(set->comms[i]);
  }
  return status;
}

static fdp_status run_acts(fdp_nccl_job *base) {
  set_job *job = (set_job *)base;
  int result = run_group(&job->nccl, &job->set, job->acts, job->act_count);
  return result == FDP_NCCL_SUCCESS ? FDP_OK : give_up(job, result);
}

static fdp_status run_abort(fdp_nccl_job *base) {
  set_job *job = (set_job *)base;
  for (int32_t i = 0; i < job->set.count; ++i) (void)job->nccl.comm_abort(job->set.comms[i]);
  return FDP_OK;
}

static fdp_status run_destroy(fdp_nccl_job *base) {
  set_job *job = (set_job *)base;
  for (int32_t i = 0; i < job->set.count; ++i) (void)job->nccl.comm_destroy(job->set.comms[i]);
  return FDP_OK;
}

/* --- opening and closing --- */

static void drop(fdp_nccl_set *set) {
  for (int32_t i = 0; i < set->count; ++i) {
    fdp_device *device = set->devices[i];
    if (set->lanes[i]) device->ops->stream_close(device, set->lanes[i]);
    if (set->last_uses[i]) device->ops->event_close(device, set->last_uses[i]);
    if (set->probes[i]) device->ops->memory_drop(device, set->probes[i]);
  }
  free(set);
}

static fdp_status open_seat(fdp_nccl_set *set, int32_t seat) {
  fdp_device *device = set->devices[seat];
  int64_t probe_bytes = (int64_t)(PROBE_GOT + set->count) * FDP_ALIGNMENT_BYTES;
  fdp_segment zeros = {NULL, 0, probe_bytes};
  void *probe = NULL;
  fdp_status status;
  FDP_TRY(device->ops->stream_open(device, &set->lanes[seat]));
  FDP_TRY(device->ops->event_open(device, &set->last_uses[seat]));
  FDP_TRY(fdp_device_memory_take(device, (size_t)probe_bytes, &probe));
  set->probes[seat] = probe;
  FDP_TRY(device->ops->pack(device, set->lanes[seat], probe, &zeros, 1));
done:
  return status;
}

fdp_status fdp_nccl_set_open(const fdp_nccl *nccl, fdp_device *const *devices, int32_t count,
                             int64_t timeout_ms, fdp_nccl_set **set) {
  fdp_status status = FDP_OK;
  set_job *job = NULL;
  fdp_nccl_set *opened = calloc(1, sizeof *opened);
  if (!opened) return fdp_fail(FDP_OUT_OF_MEMORY, "nccl: no host memory for communicators");
  opened->nccl = nccl;
  opened->count = count;
  memcpy(opened->devices, devices, (size_t)count * sizeof *devices);
  for (int32_t i = 0; i < count; ++i) FDP_TRY(open_seat(opened, i));
  job = job_open(opened, "making communicators for", run_init, 0);
  status = job ? job_finish(job, timeout_ms, opened->comms) : FDP_OUT_OF_MEMORY;
done:
  if (status == FDP_OK) {
    *set = opened;
  } else {
    drop(opened);
  }
  return status;
}

void fdp_nccl_set_close(fdp_nccl_set *set, bool aborts, int64_t timeout_ms) {
  if (!set) return;
  set_job *job = job_open(set, aborts ? "aborting on" : "closing on",
                          aborts ? run_abort : run_destroy, 0);
  fdp_status status = job ? job_finish(job, timeout_ms, NULL) : FDP_OUT_OF_MEMORY;
  if (status == FDP_OK && !set->is_stuck) {
    drop(set);
    return;
  }
  /* What the hardware may still work on is not freed: that would wait for it, for ever. */
  fdp_log(FDP_LOG_WARNING, "%s", status == FDP_OK ? "nccl: communicators of a device that did not "
          "finish are aborted, and their streams left" : fdp_last_message());
  free(set);
}

int32_t fdp_nccl_set_count(const fdp_nccl_set *set) { return set->count; }

fdp_device *const *fdp_nccl_set_devices(const fdp_nccl_set *set) { return set->devices; }

/* --- use --- */

static bool has_act(const fdp_nccl_act *acts, int32_t act_count, int32_t seat) {
  for (int32_t i = 0; i < act_count; ++i) {
    if (acts[i].seat == seat) return true;
  }
  return false;
}

static fdp_status wait_on(fdp_device *device, fdp_stream *stream, const fdp_nccl_set *before) {
  fdp_status status = FDP_OK;
  for (int32_t k = 0; k < before->count; ++k) {
    FDP_TRY(device->ops->stream_wait(device, stream, before->last_uses[k]));
  }
done:
  return status;
}

/* Note "turns". Kernels of two communicators that wait for their like on other devices, started in
 * another order on each, could fill the devices and wait for ever. So a group of one set follows
 * all of the last group of another; for a seat that takes no part in it, and whose first group may
 * come when that is forgotten, its lane does. */
static fdp_status wait_for(fdp_nccl_set *set, const fdp_nccl_set *before, const fdp_nccl_act *acts,
                           int32_t act_count) {
  fdp_status status = FDP_OK;
  for (int32_t i = 0; i < act_count; ++i) {
    FDP_TRY(wait_on(set->devices[acts[i].seat], acts[i].stream, before));
  }
  for (int32_t seat = 0; seat < set->count; ++seat) {
    fdp_device *device = set->devices[seat];
    if (has_act(acts, act_count, seat)) continue;
    FDP_TRY(wait_on(device, set->lanes[seat], before));
    FDP_TRY(device->ops->event_record(device, set->last_uses[seat], set->lanes[seat]));
    set->is_held[seat] = true;
  }
done:
  return status;
}

static fdp_status wait_for_held(const fdp_nccl_set *set, const fdp_nccl_act *acts,
                                int32_t act_count) {
  fdp_status status = FDP_OK;
  for (int32_t i = 0; i < act_count; ++i) {
    fdp_device *device = set->devices[acts[i].seat];
    if (!set->is_held[acts[i].seat]) continue;
    FDP_TRY(device->ops->stream_wait(device, acts[i].stream, set->last_uses[acts[i].seat]));
  }
done:
  return status;
}

static int32_t plan_probe(const fdp_nccl_set *set, int32_t home, fdp_nccl_act *acts) {
  int32_t count = 0;
  for (int32_t i = 0; i < set->count; ++i) {
    char *probe = set->probes[i], *home_probe = set->probes[home];
    fdp_nccl_act act = {.verb = FDP_NCCL_BROADCAST, .seat = i, .peer = home, .source = probe,
                        .target = probe, .count_elems = 1, .dtype = FDP_NCCL_FLOAT32,
                        .stream = set->lanes[i]};
    acts[count++] = act;
    act.verb = FDP_NCCL_REDUCE;
    act.source = probe + PROBE_ADDEND * FDP_ALIGNMENT_BYTES;
    act.target = probe + PROBE_SUM * FDP_ALIGNMENT_BYTES;
    acts[count++] = act;
    if (i == home) continue;
    act.verb = FDP_NCCL_SEND;
    act.source = probe + PROBE_SENT * FDP_ALIGNMENT_BYTES;
    acts[count++] = act;
    act.verb = FDP_NCCL_RECV;
    act.target = probe + PROBE_GOT * FDP_ALIGNMENT_BYTES;
    acts[count++] = act;
    act.seat = home;
    act.peer = i;
    act.stream = set->lanes[home];
    act.target = home_probe + (PROBE_GOT + i) * FDP_ALIGNMENT_BYTES;
    acts[count++] = act;
    act.verb = FDP_NCCL_SEND;
    act.source = home_probe + PROBE_SENT * FDP_ALIGNMENT_BYTES;
    acts[count++] = act;
  }
  return count;
}

fdp_status fdp_nccl_set_connect(fdp_nccl_set *set, const fdp_nccl_set *before, int32_t home,
                                int64_t timeout_ms) {
  if (set->is_connected[home]) return FDP_OK;
  set_job *job = job_open(set, "connecting", run_acts, 6 * set->count);
  if (!job) return FDP_OUT_OF_MEMORY;
  job->act_count = plan_probe(set, home, job->acts);
  fdp_status status = FDP_OK;
  if (before && before != set) status = wait_for(set, before, job->acts, job->act_count);
  if (status != FDP_OK) {
    fdp_nccl_job_drop(&job->base);
    return status;
  }
  FDP_TRY(job_finish(job, timeout_ms, NULL));
  for (int32_t i = 0; i < set->count; ++i) {
    fdp_device *device = set->devices[i];
    FDP_TRY(device->ops->event_record(device, set->last_uses[i], set->lanes[i]));
  }
  for (int32_t i = 0; i < set->count; ++i) {
    fdp_device *device = set->devices[i];
    status = device->ops->event_synchronize(device, set->last_uses[i], timeout_ms, NULL);
    set->is_stuck = status == FDP_TIMED_OUT;
    if (status != FDP_OK) goto done;
  }
  FDP_TRY(fdp_nccl_set_check(set));
  set->is_connected[home] = true;
done:
  return status;
}

fdp_status fdp_nccl_set_check(const fdp_nccl_set *set) {
  for (int32_t i = 0; i < set->count; ++i) {
    int found = FDP_NCCL_SUCCESS;
    int result = set->nccl->comm_get_async_error(set->comms[i], &found);
    if (result == FDP_NCCL_SUCCESS) result = found;
    if (result == FDP_NCCL_SUCCESS) continue;
    return fail(set->nccl, set, i, result, "an earlier operation failed on");
  }
  return FDP_OK;
}

/* NCCL makes all streams that a seat has in a group wait for each other, so one of them stands for
 * all. */
static fdp_status record_uses(fdp_nccl_set *set, const fdp_nccl_act *acts, int32_t act_count) {
  bool is_recorded[FDP_NCCL_MAX_SEATS] = {false};
  fdp_status status = FDP_OK;
  for (int32_t i = 0; i < act_count; ++i) {
    int32_t seat = acts[i].seat;
    fdp_device *device = set->devices[seat];
    if (is_recorded[seat]) continue;
    FDP_TRY(device->ops->event_record(device, set->last_uses[seat], acts[i].stream));
    is_recorded[seat] = true;
    set->is_held[seat] = false;
  }
done:
  return status;
}

fdp_status fdp_nccl_set_run(fdp_nccl_set *set, const fdp_nccl_set *before, const char *what,
                            const fdp_nccl_act *acts, int32_t act_count, bool *is_broken) {
  fdp_status status = FDP_OK;
  if (act_count == 0) return FDP_OK;
  if (before && before != set) FDP_TRY(wait_for(set, before, acts, act_count));
  FDP_TRY(wait_for_held(set, acts, act_count));
  int result = run_group(set->nccl, set, acts, act_count);
  *is_broken = result != FDP_NCCL_SUCCESS;
  if (*is_broken) return fail(set->nccl, set, -1, result, what);
  /* Without its record no group of another set would follow this one. */
  status = record_uses(set, acts, act_count);
  *is_broken = status != FDP_OK;
done:
  return status;
}

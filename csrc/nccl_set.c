#include "nccl_set.h"

#include <stdlib.h>
#include <string.h>

#include "log.h"

/* Places of FDP_ALIGNMENT_BYTES in the probe of a seat. */
enum { PROBE_BROADCAST, PROBE_ADDEND, PROBE_SUM, PROBE_SENT, PROBE_GOT };
#define PROBE_ACTS 6 /* for each seat, at most */

struct fdp_nccl_set {
  fdp_nccl_comms comms;
  fdp_stream *lanes[FDP_NCCL_MAX_SEATS];
  char *probes[FDP_NCCL_MAX_SEATS];
  fdp_event *last_uses[FDP_NCCL_MAX_SEATS]; /* recorded after each group */
  bool is_held[FDP_NCCL_MAX_SEATS]; /* the event is its lane's: its next group waits for it */
  bool is_connected[FDP_NCCL_MAX_SEATS]; /* with this one as home */
  bool is_stuck; /* a device did not finish while it was connected */
};

/* --- opening and closing --- */

static void drop(fdp_nccl_set *set) {
  for (int32_t i = 0; i < set->comms.count; ++i) {
    fdp_device *device = set->comms.devices[i];
    if (set->lanes[i]) device->ops->stream_close(device, set->lanes[i]);
    if (set->last_uses[i]) device->ops->event_close(device, set->last_uses[i]);
    if (set->probes[i]) device->ops->memory_drop(device, set->probes[i]);
  }
  free(set);
}

static fdp_status open_seat(fdp_nccl_set *set, int32_t seat) {
  fdp_device *device = set->comms.devices[seat];
  int64_t probe_bytes = (int64_t)(PROBE_GOT + set->comms.count) * FDP_ALIGNMENT_BYTES;
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
  fdp_nccl_set *opened = calloc(1, sizeof *opened);
  if (!opened) return fdp_fail(FDP_OUT_OF_MEMORY, "nccl: no host memory for communicators");
  opened->comms.nccl = nccl;
  opened->comms.count = count;
  memcpy(opened->comms.devices, devices, (size_t)count * sizeof *devices);
  for (int32_t i = 0; i < count; ++i) FDP_TRY(open_seat(opened, i));
  FDP_TRY(fdp_nccl_comms_make(&opened->comms, timeout_ms));
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
  fdp_status status = fdp_nccl_comms_end(&set->comms, aborts, timeout_ms);
  if (status == FDP_OK && !set->is_stuck) {
    drop(set);
    return;
  }
  /* What the hardware may still work on is not freed: that would wait for it, for ever. */
  fdp_log(FDP_LOG_WARNING, "%s", status == FDP_OK ? "nccl: communicators of a device that did not "
          "finish are aborted, and their streams left" : fdp_last_message());
  free(set);
}

/* --- use --- */

static bool has_act(const fdp_nccl_act *acts, int32_t act_count, int32_t seat) {
  for (int32_t i = 0; i < act_count; ++i) {
    if (acts[i].seat == seat) return true;
  }
  return false;
}

static fdp_status wait_on(fdp_device *device, fdp_stream *stream, const fdp_nccl_set *before) {
  fdp_status status = FDP_OK;
  for (int32_t k = 0; k < before->comms.count; ++k) {
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
    FDP_TRY(wait_on(set->comms.devices[acts[i].seat], acts[i].stream, before));
  }
  for (int32_t seat = 0; seat < set->comms.count; ++seat) {
    fdp_device *device = set->comms.devices[seat];
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
    fdp_device *device = set->comms.devices[acts[i].seat];
    if (!set->is_held[acts[i].seat]) continue;
    FDP_TRY(device->ops->stream_wait(device, acts[i].stream, set->last_uses[acts[i].seat]));
  }
done:
  return status;
}

static int32_t plan_probe(const fdp_nccl_set *set, int32_t home, fdp_nccl_act *acts) {
  int32_t count = 0;
  for (int32_t i = 0; i < set->comms.count; ++i) {
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
  fdp_nccl_act acts[PROBE_ACTS * FDP_NCCL_MAX_SEATS];
  fdp_status status = FDP_OK;
  if (set->is_connected[home]) return FDP_OK;
  int32_t act_count = plan_probe(set, home, acts);
  if (before && before != set) FDP_TRY(wait_for(set, before, acts, act_count));
  FDP_TRY(fdp_nccl_comms_run_within(&set->comms, "connecting", acts, act_count, timeout_ms));
  for (int32_t i = 0; i < set->comms.count; ++i) {
    fdp_device *device = set->comms.devices[i];
    FDP_TRY(device->ops->event_record(device, set->last_uses[i], set->lanes[i]));
  }
  for (int32_t i = 0; i < set->comms.count; ++i) {
    fdp_device *device = set->comms.devices[i];
    status = device->ops->event_synchronize(device, set->last_uses[i], timeout_ms, NULL);
    set->is_stuck = status == FDP_TIMED_OUT;
    if (status != FDP_OK) goto done;
  }
  FDP_TRY(fdp_nccl_set_check(set));
  set->is_connected[home] = true;
done:
  return status;
}

fdp_status fdp_nccl_set_check(const fdp_nccl_set *set) { return fdp_nccl_comms_check(&set->comms); }

/* NCCL makes all streams that a seat has in a group wait for each other, so one of them stands for
 * all. */
static fdp_status record_uses(fdp_nccl_set *set, const fdp_nccl_act *acts, int32_t act_count) {
  bool is_recorded[FDP_NCCL_MAX_SEATS] = {false};
  fdp_status status = FDP_OK;
  for (int32_t i = 0; i < act_count; ++i) {
    int32_t seat = acts[i].seat;
    fdp_device *device = set->comms.devices[seat];
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
  status = fdp_nccl_comms_run(&set->comms, what, acts, act_count);
  *is_broken = status != FDP_OK;
  if (*is_broken) return status;
  /* Without its record no group of another set would follow this one. */
  status = record_uses(set, acts, act_count);
  *is_broken = status != FDP_OK;
done:
  return status;
}

#include <stdlib.h>

#include "simulate.h"

static const fdp_dtype *random_dtype(sim *world) {
  static const fdp_dtype *const dtypes[] = {&float32, &float64, &int32, &int64};
  return dtypes[sim_choose(world, 4)];
}

/* Of each device the pair whose compute is on the default stream; -1: none is. Half of all callers
 * have streams of their own alone; more where NCCL carries, whose sets are seldom at odds. */
static void choose_defaults(run *in, int32_t *defaults) {
  sim *world = in->world;
  bool has_some = sim_choose(world, in->has_nccl ? 8 : 2) == 0;
  for (int32_t d = 0; d < MAX_DEVICES; ++d) {
    defaults[d] = has_some && sim_choose(world, 4) != 0 ? (int32_t)sim_choose(world, STREAMS_EACH)
                                                        : -1;
  }
}

static void stream_pair(caller *own, int32_t device, int32_t number, const int32_t *defaults,
                        fdp_stream **compute, fdp_stream **beside) {
  fdp_device *on = own->run->devices[device];
  sim_spare(own->run->world, true);
  for (int32_t kind = 0; kind < 2; ++kind) {
    fdp_stream **stream = &own->streams[device][number][kind];
    if (!*stream) on->ops->stream_open(on, stream);
  }
  sim_spare(own->run->world, false);
  *compute = number == defaults[device] ? NULL : own->streams[device][number][0];
  *beside = own->streams[device][number][1];
}

/* Where replicas are, and on which streams: a device's replicas share them, or have their own. */
static void place(caller *own) {
  sim *world = own->run->world;
  bool shares = sim_choose(world, 2) == 0, overlaps = sim_choose(world, 4) != 0;
  int32_t numbers[MAX_DEVICES] = {0}, defaults[MAX_DEVICES];
  choose_defaults(own->run, defaults);
  uint64_t most = sim_choose(world, 2) == 0 ? 3 : MAX_REPLICAS;
  own->replica_count = 1 + (int32_t)sim_choose(world, most);
  if (own->replica_count == 1 && sim_choose(world, 4) != 0) own->replica_count = 2;
  for (int32_t r = 0; r < own->replica_count; ++r) {
    bool is_plain = sim_choose(world, 2) == 0; /* each the next device */
    uint64_t count = (uint64_t)own->run->device_count;
    own->devices[r] = is_plain ? r % own->run->device_count : (int32_t)sim_choose(world, count);
    int32_t device = own->devices[r];
    stream_pair(own, device, numbers[device], defaults, &own->compute[r], &own->beside[r]);
    if (!shares && numbers[device] + 1 < STREAMS_EACH) numbers[device] += 1;
  }
  stream_pair(own, 0, shares ? 0 : STREAMS_EACH - 1, defaults, &own->compute[MAX_REPLICAS],
              &own->beside[MAX_REPLICAS]);
  for (int32_t r = 0; r <= MAX_REPLICAS && !overlaps; ++r) own->beside[r] = own->compute[r];
}

typedef struct model_fill {
  fdp_view view;
  int64_t values[MAX_ELEMS];
} model_fill;

static void run_fill(void *argument) {
  const model_fill *fill = argument;
  int64_t count = fdp_view_count_elems(&fill->view);
  for (int64_t i = 0; i < count; ++i) {
    rig_store(fill->view.dtype, rig_address(&fill->view, i), fill->values[i]);
  }
}

static void open_bucket(caller *own, model_bucket *bucket) {
  run *in = own->run;
  sim *world = in->world;
  fdp_view prototypes[MAX_SLOTS];
  bucket->dtype = *random_dtype(world);
  bucket->slot_count = 1 + (int32_t)sim_choose(world, MAX_SLOTS);
  for (int32_t k = 0; k < bucket->slot_count; ++k) {
    int64_t shape[] = {1 + (int64_t)sim_choose(world, MAX_ELEMS / 2),
                       1 + (int64_t)sim_choose(world, 2)};
    rig_layout layout = sim_choose(world, 4) == 0 ? RIG_GAPS
                        : sim_choose(world, 4) == 0 ? RIG_COLUMNS : RIG_ROWS;
    user_array *made = &bucket->parameters[k];
    *made = array_take(in, 0, own->compute[MAX_REPLICAS], bucket->dtype, 2, shape, layout);
    prototypes[k] = made->view;
    model_fill *fill = run_keep(in, sizeof *fill);
    fill->view = made->view;
    for (int64_t i = 0; i < shape[0] * shape[1]; ++i) {
      bucket->expected[k][i] = fill->values[i] = (int64_t)sim_choose(world, 127);
    }
    sim_work(in->devices[0], own->compute[MAX_REPLICAS], "the first parameters", run_fill, fill,
             NULL, 0, &made->view, 1);
  }
  if (fdp_bucket_open(prototypes, NULL, bucket->slot_count, &bucket->plan) != FDP_OK) {
    sim_report(world, "fdp_bucket_open: %s", fdp_last_message());
  }
}

void model_open(caller *own) {
  sim *world = own->run->world;
  place(own);
  own->step_count = 1 + (int32_t)sim_choose(world, MAX_STEPS);
  own->bucket_count = 1 + (int32_t)sim_choose(world, MAX_BUCKETS);
  own->input = sim_choose(world, 2) == 0 ? ON_DEVICE : (home_place)sim_choose(world, 3);
  own->output = sim_choose(world, 2) == 0 ? ON_DEVICE : (home_place)sim_choose(world, 3);
  for (int32_t b = 0; b < own->bucket_count; ++b) open_bucket(own, &own->buckets[b]);
}

void model_check(caller *own) {
  for (int32_t b = 0; b < own->bucket_count; ++b) {
    const model_bucket *bucket = &own->buckets[b];
    for (int32_t k = 0; k < bucket->slot_count; ++k) {
      const fdp_view *view = &bucket->parameters[k].view;
      int64_t count = fdp_view_count_elems(view);
      for (int64_t i = 0; i < count; ++i) {
        int64_t found = rig_load(view->dtype, rig_address(view, i));
        if (found == bucket->expected[k][i]) continue;
        sim_report(own->run->world, "parameter %d of bucket %d: element %lld is %lld, expected "
                   "%lld", k, b, (long long)i, (long long)found,
                   (long long)bucket->expected[k][i]);
        return;
      }
    }
  }
}

void model_close(caller *own) {
  for (int32_t b = 0; b < own->bucket_count; ++b) {
    model_bucket *bucket = &own->buckets[b];
    for (int32_t k = 0; k < bucket->slot_count; ++k) array_free(&bucket->parameters[k]);
    fdp_bucket_close(bucket->plan);
    bucket->plan = NULL;
  }
}

int64_t model_checksum(const model_bucket *bucket) {
  int64_t sum = 0;
  for (int32_t k = 0; k < bucket->slot_count; ++k) {
    int64_t count = fdp_view_count_elems(&bucket->parameters[k].view);
    for (int64_t i = 0; i < count; ++i) sum += bucket->expected[k][i] * (k + i + 1);
  }
  return sum;
}

int64_t model_gradient(int64_t parameter, int64_t from_above, int32_t replica, int64_t index) {
  return (parameter + from_above + replica + index) % 31;
}

int64_t model_update(int64_t parameter, int64_t gradient) {
  return (parameter * 3 + gradient) % 127;
}

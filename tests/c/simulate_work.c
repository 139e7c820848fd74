#include "simulate_work.h"

#include <string.h>

/* One piece of work; not every kind uses all of it. */
typedef struct piece {
  caller *own;
  const char *what;
  int32_t replica;
  int32_t slot_count;
  int64_t values[MAX_ROWS];
  fdp_view rows;   /* a replica's, or all */
  fdp_view input;
  fdp_view buffer;
  fdp_view slots[MAX_SLOTS];
  fdp_view written[MAX_SLOTS];
  bool is_first;
} piece;

static piece *piece_open(caller *own, int32_t replica) {
  piece *made = run_keep(own->run, sizeof *made);
  made->own = own;
  made->replica = replica;
  return made;
}

static int64_t load(const fdp_view *view, int64_t index) {
  return rig_load(view->dtype, rig_address(view, index));
}

static void store(const fdp_view *view, int64_t index, int64_t value) {
  rig_store(view->dtype, rig_address(view, index), value);
}

static void enqueue(piece *work, const char *what, void (*go)(void *argument),
                    const fdp_view *reads, int32_t read_count, const fdp_view *writes,
                    int32_t write_count) {
  caller *own = work->own;
  int32_t device = work->replica == MAX_REPLICAS ? 0 : own->devices[work->replica];
  sim_work(own->run->devices[device], own->compute[work->replica], what, go, work, reads,
           read_count, writes, write_count);
}

/* --- rows --- */

static void enqueue_home(piece *work, home_place place, const char *what,
                         void (*go)(void *argument), bool writes) {
  caller *own = work->own;
  run *in = own->run;
  const fdp_view *view = &work->rows;
  if (place == AT_ONCE) {
    int64_t size_bytes = ((view->shape[0] - 1) * view->strides[0] + 1) * (int64_t)sizeof(int64_t);
    sim_host_access(in->world, view->data, size_bytes, writes);
    go(work);
    return;
  }
  bool is_device = place == ON_DEVICE;
  sim_work(in->devices[is_device ? 0 : MAX_DEVICES],
           is_device ? own->compute[MAX_REPLICAS] : own->host_stream, what, go, work, view,
           writes ? 0 : 1, view, writes ? 1 : 0);
}

static void run_fill_rows(void *argument) {
  const piece *work = argument;
  for (int64_t i = 0; i < work->rows.shape[0]; ++i) store(&work->rows, i, work->values[i]);
}

void work_fill_home(caller *own, home_place place, const fdp_view *view, const int64_t *values) {
  piece *work = piece_open(own, MAX_REPLICAS);
  work->rows = *view;
  memcpy(work->values, values, (size_t)view->shape[0] * sizeof *values);
  enqueue_home(work, place, "what is given", run_fill_rows, true);
}

static void run_check_rows(void *argument) {
  const piece *work = argument;
  for (int64_t i = 0; i < work->rows.shape[0]; ++i) {
    if (load(&work->rows, i) == work->values[i]) continue;
    sim_report(work->own->run->world, "row %lld of %s is %lld, expected %lld", (long long)i,
               work->what, (long long)load(&work->rows, i), (long long)work->values[i]);
    return;
  }
}

/* And then the owner may write it. */
void work_check_home(caller *own, home_place place, const char *what, const fdp_view *view,
                     const int64_t *values) {
  piece *work = piece_open(own, MAX_REPLICAS);
  work->what = what;
  work->rows = *view;
  memcpy(work->values, values, (size_t)view->shape[0] * sizeof *values);
  enqueue_home(work, place, what, run_check_rows, false);
  if (place == ON_DEVICE) run_claim(own->run, 0, own->compute[MAX_REPLICAS], view);
}

/* --- the model --- */

/* As model_checksum. */
static int64_t checksum(const piece *work) {
  int64_t sum = 0;
  for (int32_t k = 0; k < work->slot_count; ++k) {
    int64_t count = fdp_view_count_elems(&work->slots[k]);
    for (int64_t i = 0; i < count; ++i) sum += load(&work->slots[k], i) % 1024 * (k + i + 1);
  }
  return sum;
}

static void run_forward(void *argument) {
  const piece *work = argument;
  int64_t added = checksum(work);
  for (int64_t i = 0; i < work->rows.shape[0]; ++i) {
    int64_t before = work->is_first ? load(&work->input, i) + load(&work->buffer, i)
                                    : load(&work->rows, i);
    store(&work->rows, i, (before + added) % 65536);
  }
}

static void read_slots(caller *own, step *now, int32_t replica, int32_t bucket, piece *work) {
  user_array *flat = &now->flats[bucket][replica];
  work->slot_count = own->buckets[bucket].slot_count;
  for (int32_t k = 0; k < work->slot_count; ++k) {
    work->slots[k] = fdp_bucket_slot(own->buckets[bucket].plan, k, flat->view.data,
                                     flat->view.device);
  }
}

void work_forward(caller *own, step *now, int32_t replica, int32_t bucket) {
  piece *work = piece_open(own, replica);
  fdp_view reads[MAX_SLOTS + 2];
  int32_t read_count = 0;
  read_slots(own, now, replica, bucket, work);
  for (int32_t k = 0; k < work->slot_count; ++k) reads[read_count++] = work->slots[k];
  work->rows = now->parts[STEP_OUTPUT][replica].view;
  work->is_first = bucket == 0;
  if (work->is_first) {
    reads[read_count++] = work->input = now->parts[STEP_INPUT][replica].view;
    reads[read_count++] = work->buffer = now->parts[STEP_BUFFER][replica].view;
  } else {
    reads[read_count++] = work->rows;
  }
  enqueue(work, "forward", run_forward, reads, read_count, &work->rows, 1);
}

static void run_backward(void *argument) {
  const piece *work = argument;
  int64_t from_above = load(&work->rows, 0);
  for (int32_t k = 0; k < work->slot_count; ++k) {
    if (!work->written[k].data) continue;
    int64_t count = fdp_view_count_elems(&work->slots[k]);
    for (int64_t i = 0; i < count; ++i) {
      store(&work->written[k], i,
            model_gradient(load(&work->slots[k], i), from_above, work->replica, i));
    }
  }
}

/* Where the gradient of a slot is written. */
static fdp_view place_gradient(caller *own, step *now, int32_t r, int32_t b, int32_t k,
                               bool is_in_place) {
  run *in = own->run;
  const fdp_view *parameter = &own->buckets[b].parameters[k].view;
  if (is_in_place) {
    return fdp_bucket_slot(own->buckets[b].plan, k, now->sums[b].view.data, in->devices[0]->id);
  }
  static const rig_layout layouts[] = {RIG_ROWS, RIG_ROWS, RIG_ROWS, RIG_ROWS,
                                       RIG_SHIFTED, RIG_COLUMNS, RIG_GAPS, RIG_GAPS};
  rig_layout layout = layouts[sim_choose(in->world, 8)];
  now->gradients[b][r][k] = array_take(in, own->devices[r], own->compute[r], parameter->dtype, 2,
                                       parameter->shape, layout);
  return now->gradients[b][r][k].view;
}

void work_backward(caller *own, step *now, int32_t replica, int32_t bucket) {
  run *in = own->run;
  piece *work = piece_open(own, replica);
  fdp_view reads[MAX_SLOTS + 1], writes[MAX_SLOTS];
  int32_t read_count = 0, write_count = 0;
  bool is_in_place = replica == 0 && own->devices[0] == 0 && sim_choose(in->world, 3) == 0;
  if (is_in_place) run_order(in, 0, own->beside[MAX_REPLICAS], 0, own->compute[0]);
  read_slots(own, now, replica, bucket, work);
  work->rows = now->parts[STEP_ABOVE][replica].view;
  reads[read_count++] = work->rows;
  for (int32_t k = 0; k < work->slot_count; ++k) {
    if (!now->has_gradient[bucket][replica][k]) continue;
    work->written[k] = place_gradient(own, now, replica, bucket, k, is_in_place);
    now->gradient_views[bucket][replica][k] = work->written[k];
    reads[read_count++] = work->slots[k];
    writes[write_count++] = work->written[k];
  }
  if (write_count == 0) return;
  enqueue(work, "backward", run_backward, reads, read_count, writes, write_count);
}

static void run_update(void *argument) {
  const piece *work = argument;
  for (int32_t k = 0; k < work->slot_count; ++k) {
    int64_t count = fdp_view_count_elems(&work->slots[k]);
    for (int64_t i = 0; i < count; ++i) {
      store(&work->written[k], i,
            model_update(load(&work->written[k], i), load(&work->slots[k], i)));
    }
  }
}

/* What the parameters should then be. */
static void expect_update(caller *own, const step *now, int32_t b) {
  model_bucket *bucket = &own->buckets[b];
  for (int32_t k = 0; k < bucket->slot_count; ++k) {
    int64_t count = fdp_view_count_elems(&bucket->parameters[k].view);
    for (int64_t i = 0; i < count; ++i) {
      int64_t gradient = 0;
      for (int32_t r = 0; r < own->replica_count; ++r) {
        if (!now->has_gradient[b][r][k]) continue;
        gradient += model_gradient(bucket->expected[k][i], now->above[r * now->rows_each], r, i);
      }
      bucket->expected[k][i] = model_update(bucket->expected[k][i], gradient);
    }
  }
}

void work_update(caller *own, step *now, int32_t bucket) {
  piece *work = piece_open(own, MAX_REPLICAS);
  fdp_view reads[2 * MAX_SLOTS];
  work->slot_count = own->buckets[bucket].slot_count;
  for (int32_t k = 0; k < work->slot_count; ++k) {
    work->slots[k] = fdp_bucket_slot(own->buckets[bucket].plan, k, now->sums[bucket].view.data,
                                     now->sums[bucket].view.device);
    work->written[k] = own->buckets[bucket].parameters[k].view;
    reads[2 * k] = work->slots[k];
    reads[2 * k + 1] = work->written[k];
  }
  enqueue(work, "optimizer", run_update, reads, 2 * work->slot_count, work->written,
          work->slot_count);
  expect_update(own, now, bucket);
}

void step_plan(caller *own, step *now) {
  sim *world = own->run->world;
  int64_t added = 0;
  now->rows_each = sim_choose(world, 8) == 0 ? MANY_ROWS : 1 + (int64_t)sim_choose(world, 3);
  for (int32_t b = 0; b < own->bucket_count; ++b) {
    added += model_checksum(&own->buckets[b]);
    for (int32_t r = 0; r < own->replica_count; ++r) {
      for (int32_t k = 0; k < own->buckets[b].slot_count; ++k) {
        now->has_gradient[b][r][k] = sim_choose(world, 8) != 0;
      }
    }
  }
  for (int64_t i = 0; i < now->rows_each * own->replica_count; ++i) {
    int64_t within = i % now->rows_each;
    now->input[i] = (int64_t)sim_choose(world, 100);
    if (i < now->rows_each) now->buffer[i] = (int64_t)sim_choose(world, 100);
    now->output[i] = (now->input[i] + now->buffer[within] + added) % 65536;
    now->above[i] = now->output[i] % 7;
    now->loss[within] += now->input[i];
  }
}

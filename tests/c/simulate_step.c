/* A training step, by the rules of fastdp/streams.py: parameters are broadcast in buckets on
 * communication streams, read by the forward where a bucket has arrived, gradients are summed
 * bucket by bucket while the backward goes on, and the optimizer writes the parameters. */
#include "../../csrc/broadcast.h"
#include "../../csrc/deadline.h"
#include "../../csrc/gather.h"
#include "../../csrc/reduce.h"
#include "../../csrc/scatter.h"
#include "sim_threads.h"
#include "simulate.h"
#include "simulate_work.h"

static fdp_stream *home_compute(const caller *own) { return own->compute[MAX_REPLICAS]; }

static fdp_stream *home_beside(const caller *own) { return own->beside[MAX_REPLICAS]; }

/* No call waits longer than one deadline, however many devices it waits for, but for NCCL's own
 * when that makes connections. */
static void check_deadline(caller *own, const char *verb) {
  run *in = own->run;
  int64_t lost_ms = sim_lost_ms(in->world) - own->lost_ms;
  if (lost_ms > DEADLINE_MS + (in->has_nccl ? FDP_NCCL_TIMEOUT_MS : 0)) {
    sim_report(in->world, "%s waited %lld ms for a device that never finishes", verb,
               (long long)lost_ms);
  }
  own->lost_ms = sim_lost_ms(in->world);
}

/* Whether the step goes on. A failure is one that was asked for. */
static bool works(caller *own, fdp_status status, const char *verb) {
  run *in = own->run;
  check_deadline(own, verb);
  if (status == FDP_OK) return true;
  if (!*fdp_last_message()) sim_report(in->world, "%s failed without a message", verb);
  if (status == FDP_TIMED_OUT && sim_is_stalled(in->world)) return false;
  if (status == FDP_UNSUPPORTED && in->has_nccl && (in->armed_count > 0 || in->stalls)) {
    in->is_refused = true; /* what broke while communicators were made is not tried again */
    return false;
  }
  if (++in->failure_count > in->armed_count) {
    sim_report(in->world, "%s failed, and nothing was told to: %s", verb, fdp_last_message());
  }
  return false;
}

/* Every other with gaps, which no transport carries as it is. */
static user_array rows_take(caller *own, int32_t replica, int64_t count) {
  int32_t device = replica == MAX_REPLICAS ? 0 : own->devices[replica];
  rig_layout layout = sim_choose(own->run->world, 2) == 0 ? RIG_GAPS : RIG_ROWS;
  return array_take(own->run, device, own->compute[replica], int64, 1, &count, layout);
}

static fdp_view host_rows(caller *own, int64_t count) {
  int64_t stride = 1 + (int64_t)sim_choose(own->run->world, 2);
  fdp_view view = {.device = host, .dtype = int64, .ndim = 1, .shape = {count},
                   .strides = {stride}};
  view.data = run_keep(own->run, (size_t)(count * stride) * sizeof(int64_t));
  return view;
}

/* Home's input and output: on its device, or in host memory, on a stream or at once. */
static fdp_view home_rows(caller *own, step *now, step_kind kind, home_place place, int64_t count) {
  if (place == AT_ONCE) return host_rows(own, count);
  if (place == ON_DEVICE) {
    now->whole[kind] = rows_take(own, MAX_REPLICAS, count);
  } else {
    rig_layout layout = sim_choose(own->run->world, 2) == 0 ? RIG_GAPS : RIG_ROWS;
    now->whole[kind] = array_take(own->run, MAX_DEVICES, own->host_stream, int64, 1, &count,
                                  layout);
  }
  return now->whole[kind].view;
}

static fdp_stream *home_stream(const caller *own, home_place place) {
  return place == AT_ONCE ? NULL : place == ON_DEVICE ? home_compute(own) : own->host_stream;
}

static void claim_parts(caller *own, const fdp_view *parts) {
  for (int32_t r = 0; r < own->replica_count; ++r) {
    run_claim(own->run, own->devices[r], own->compute[r], &parts[r]);
  }
}

/* --- forward --- */

/* The flats first, then the communication streams wait for all compute, then they write. */
static void begin(caller *own, step *now) {
  run *in = own->run;
  for (int32_t b = 0; b < own->bucket_count; ++b) {
    int64_t size_bytes = fdp_bucket_size_bytes(own->buckets[b].plan);
    int64_t count = size_bytes / (int64_t)fdp_dtype_bytes(own->buckets[b].dtype);
    for (int32_t r = 0; r < own->replica_count; ++r) {
      now->flats[b][r] = array_take(in, own->devices[r], own->beside[r], own->buckets[b].dtype, 1,
                                    &count, RIG_ROWS);
    }
  }
  for (int32_t r = 0; r < own->replica_count; ++r) {
    run_order(in, own->devices[r], own->compute[r], own->devices[r], own->beside[r]);
  }
  run_order(in, 0, home_compute(own), 0, home_beside(own));
  for (int32_t b = 0; b < own->bucket_count; ++b) {
    for (int32_t r = 0; r < own->replica_count; ++r) {
      array_poison(in, &now->flats[b][r], own->beside[r]);
    }
  }
}

static bool replicate(caller *own, step *now) {
  run *in = own->run;
  for (int32_t b = 0; b < own->bucket_count; ++b) {
    fdp_view sources[MAX_SLOTS], flats[MAX_REPLICAS];
    for (int32_t k = 0; k < own->buckets[b].slot_count; ++k) {
      sources[k] = own->buckets[b].parameters[k].view;
    }
    for (int32_t r = 0; r < own->replica_count; ++r) flats[r] = now->flats[b][r].view;
    sim_note(in->world, "broadcast of bucket", b);
    fdp_status status = fdp_bucket_broadcast(in->context, own->buckets[b].plan, sources,
                                             home_beside(own), flats, own->beside,
                                             own->replica_count);
    if (!works(own, status, "bucket_broadcast")) return false;
    for (int32_t r = 0; r < own->replica_count; ++r) {
      run_claim(in, own->devices[r], own->beside[r], &flats[r]);
      now->arrived[b][r] = run_event(in, own->devices[r], own->beside[r]);
    }
  }
  return true;
}

static bool scatter_input(caller *own, step *now) {
  run *in = own->run;
  fdp_view whole, parts[MAX_REPLICAS];
  int64_t rows = now->rows_each * own->replica_count;
  sim_note(in->world, "scatter of the input", 0);
  fdp_stream *stream = home_stream(own, own->input);
  whole = home_rows(own, now, STEP_INPUT, own->input, rows);
  work_fill_home(own, own->input, &whole, now->input);
  for (int32_t r = 0; r < own->replica_count; ++r) {
    now->parts[STEP_INPUT][r] = rows_take(own, r, now->rows_each);
    parts[r] = now->parts[STEP_INPUT][r].view;
    array_poison(in, &now->parts[STEP_INPUT][r], own->compute[r]);
  }
  fdp_status status = fdp_scatter(in->context, &whole, stream, parts, own->compute,
                                  own->replica_count, 0);
  if (!works(own, status, "scatter")) return false;
  if (own->input != AT_ONCE) array_poison(in, &now->whole[STEP_INPUT], stream);
  claim_parts(own, parts);
  return true;
}

/* Of a buffer, whole; each replica adds it to its rows. */
static bool broadcast_buffer(caller *own, step *now) {
  run *in = own->run;
  fdp_view parts[MAX_REPLICAS];
  now->whole[STEP_BUFFER] = rows_take(own, MAX_REPLICAS, now->rows_each);
  work_fill_home(own, ON_DEVICE, &now->whole[STEP_BUFFER].view, now->buffer);
  for (int32_t r = 0; r < own->replica_count; ++r) {
    now->parts[STEP_BUFFER][r] = rows_take(own, r, now->rows_each);
    parts[r] = now->parts[STEP_BUFFER][r].view;
    array_poison(in, &now->parts[STEP_BUFFER][r], own->compute[r]);
  }
  sim_note(in->world, "broadcast of a buffer", 0);
  fdp_status status = fdp_broadcast(in->context, &now->whole[STEP_BUFFER].view, home_compute(own),
                                    parts, own->compute, own->replica_count);
  if (!works(own, status, "broadcast")) return false;
  claim_parts(own, parts);
  array_poison(in, &now->whole[STEP_BUFFER], home_compute(own));
  return true;
}

static void forward(caller *own, step *now) {
  run *in = own->run;
  sim_note(in->world, "forward", 0);
  for (int32_t r = 0; r < own->replica_count; ++r) {
    now->parts[STEP_OUTPUT][r] = rows_take(own, r, now->rows_each);
    for (int32_t b = 0; b < own->bucket_count; ++b) {
      run_wait(in, own->devices[r], own->compute[r], now->arrived[b][r]);
      work_forward(own, now, r, b);
    }
    sim_yield(in->world);
  }
  for (int32_t r = 0; r < own->replica_count; ++r) { /* Communication.deliver */
    run_order(in, own->devices[r], own->beside[r], own->devices[r], own->compute[r]);
  }
  run_order(in, 0, home_beside(own), 0, home_compute(own));
}

static bool gather_output(caller *own, step *now) {
  run *in = own->run;
  fdp_view whole, parts[MAX_REPLICAS];
  int64_t rows = now->rows_each * own->replica_count;
  sim_note(in->world, "gather of the output", 0);
  fdp_stream *stream = home_stream(own, own->output);
  whole = home_rows(own, now, STEP_OUTPUT, own->output, rows);
  if (own->output != AT_ONCE) array_poison(in, &now->whole[STEP_OUTPUT], stream);
  for (int32_t r = 0; r < own->replica_count; ++r) parts[r] = now->parts[STEP_OUTPUT][r].view;
  fdp_status status = fdp_gather(in->context, parts, own->compute, own->replica_count, &whole,
                                 stream, 0);
  if (!works(own, status, "gather")) return false;
  for (int32_t r = 0; r < own->replica_count; ++r) {
    array_poison(in, &now->parts[STEP_OUTPUT][r], own->compute[r]);
  }
  work_check_home(own, own->output, "the output", &whole, now->output);
  return true;
}

/* --- backward --- */

static bool scatter_gradient(caller *own, step *now) {
  run *in = own->run;
  fdp_view parts[MAX_REPLICAS];
  now->whole[STEP_ABOVE] = rows_take(own, MAX_REPLICAS, now->rows_each * own->replica_count);
  work_fill_home(own, ON_DEVICE, &now->whole[STEP_ABOVE].view, now->above);
  for (int32_t r = 0; r < own->replica_count; ++r) {
    now->parts[STEP_ABOVE][r] = rows_take(own, r, now->rows_each);
    parts[r] = now->parts[STEP_ABOVE][r].view;
  }
  sim_note(in->world, "scatter of the gradient", 0);
  fdp_status status = fdp_scatter(in->context, &now->whole[STEP_ABOVE].view, home_compute(own),
                                  parts, own->compute, own->replica_count, 0);
  if (!works(own, status, "scatter")) return false;
  array_poison(in, &now->whole[STEP_ABOVE], home_compute(own));
  claim_parts(own, parts);
  return true;
}

/* Compute waits for the reads of its gradients before it uses their memory again. */
static void retire(caller *own, step *now, int32_t b) {
  run *in = own->run;
  for (int32_t r = 0; r < own->replica_count; ++r) {
    run_order(in, own->devices[r], own->beside[r], own->devices[r], own->compute[r]);
    for (int32_t k = 0; k < own->buckets[b].slot_count; ++k) {
      user_array *gradient = &now->gradients[b][r][k];
      if (gradient->block) array_poison(in, gradient, own->compute[r]);
      array_free(gradient);
    }
  }
}

static bool reduce_bucket(caller *own, step *now, int32_t b) {
  run *in = own->run;
  model_bucket *bucket = &own->buckets[b];
  const fdp_view *gradients[MAX_REPLICAS * MAX_SLOTS];
  for (int32_t r = 0; r < own->replica_count; ++r) {
    for (int32_t k = 0; k < bucket->slot_count; ++k) {
      gradients[r * bucket->slot_count + k] =
          now->has_gradient[b][r][k] ? &now->gradient_views[b][r][k] : NULL;
    }
    run_order(in, own->devices[r], own->compute[r], own->devices[r], own->beside[r]);
  }
  run_order(in, 0, home_compute(own), 0, home_beside(own));
  sim_note(in->world, "reduce of bucket", b);
  fdp_status status = fdp_bucket_reduce(in->context, bucket->plan, gradients, own->beside,
                                        own->replica_count, &now->sums[b].view, home_beside(own));
  if (!works(own, status, "bucket_reduce")) return false;
  run_claim(in, 0, home_beside(own), &now->sums[b].view);
  return true;
}

static bool backward(caller *own, step *now) {
  run *in = own->run;
  int32_t retired = own->bucket_count;
  for (int32_t b = own->bucket_count - 1; b >= 0; --b) {
    int64_t count = now->flats[b][0].view.shape[0];
    now->sums[b] = array_take(in, 0, home_beside(own), own->buckets[b].dtype, 1, &count, RIG_ROWS);
    array_poison(in, &now->sums[b], home_beside(own));
    for (int32_t r = 0; r < own->replica_count; ++r) {
      sim_note(in->world, "backward of bucket", b);
      work_backward(own, now, r, b);
    }
    if (!reduce_bucket(own, now, b)) return false;
    if (retired - b > 1) retire(own, now, --retired);
  }
  while (retired > 0) retire(own, now, --retired);
  return true;
}

/* Each replica's rows, summed at home: as a loss that every replica has. */
static bool reduce_loss(caller *own, step *now) {
  run *in = own->run;
  fdp_view parts[MAX_REPLICAS];
  now->whole[STEP_LOSS] = rows_take(own, MAX_REPLICAS, now->rows_each);
  array_poison(in, &now->whole[STEP_LOSS], home_compute(own));
  for (int32_t r = 0; r < own->replica_count; ++r) {
    parts[r] = now->parts[STEP_INPUT][r].view;
  }
  sim_note(in->world, "reduce of the loss", 0);
  fdp_status status = fdp_reduce(in->context, parts, own->compute, own->replica_count,
                                 &now->whole[STEP_LOSS].view, home_compute(own));
  if (!works(own, status, "reduce")) return false;
  run_claim(in, 0, home_compute(own), &now->whole[STEP_LOSS].view);
  for (int32_t r = 0; r < own->replica_count; ++r) {
    array_poison(in, &now->parts[STEP_INPUT][r], own->compute[r]);
  }
  work_check_home(own, ON_DEVICE, "the loss", &now->whole[STEP_LOSS].view, now->loss);
  return true;
}

/* The watchdog: what the step enqueued is over, or the step is an error. */
static bool is_in_time(caller *own) {
  run *in = own->run;
  fdp_status status = FDP_OK;
  for (int32_t r = 0; r <= own->replica_count && status == FDP_OK && in->stalls; ++r) {
    bool is_home = r == own->replica_count;
    int32_t device = is_home ? 0 : own->devices[r];
    fdp_device *on = in->devices[device];
    fdp_event *event = run_event(in, device, is_home ? home_compute(own) : own->compute[r]);
    sim_spare(in->world, true);
    status = on->ops->event_synchronize(on, event, DEADLINE_MS, NULL);
    sim_spare(in->world, false);
    run_event_close(in, device, event);
  }
  return works(own, status, "the watchdog");
}

static void optimize(caller *own, step *now) {
  run *in = own->run;
  sim_note(in->world, "optimizer", 0);
  run_order(in, 0, home_beside(own), 0, home_compute(own));
  for (int32_t b = 0; b < own->bucket_count; ++b) work_update(own, now, b);
}

/* --- a step --- */

static void step_free(caller *own, step *now) {
  run *in = own->run;
  for (int32_t b = 0; b < own->bucket_count; ++b) {
    array_free(&now->sums[b]);
    for (int32_t r = 0; r < own->replica_count; ++r) {
      array_free(&now->flats[b][r]);
      if (now->arrived[b][r]) run_event_close(in, own->devices[r], now->arrived[b][r]);
      for (int32_t k = 0; k < MAX_SLOTS; ++k) array_free(&now->gradients[b][r][k]);
    }
  }
  for (int32_t kind = 0; kind < STEP_KINDS; ++kind) {
    array_free(&now->whole[kind]);
    for (int32_t r = 0; r < own->replica_count; ++r) array_free(&now->parts[kind][r]);
  }
}

static bool step_run(caller *own, step *now) {
  begin(own, now);
  if (!replicate(own, now) || !scatter_input(own, now) || !broadcast_buffer(own, now)) return false;
  forward(own, now);
  if (!gather_output(own, now) || !scatter_gradient(own, now) || !backward(own, now)) return false;
  if (!reduce_loss(own, now) || !is_in_time(own)) return false;
  optimize(own, now);
  return true;
}

static bool spans_devices(const caller *own) {
  for (int32_t r = 0; r < own->replica_count; ++r) {
    if (own->devices[r] != 0) return true;
  }
  return false;
}

void caller_free_late(caller *own) {
  while (own->late_count > 0) step_free(own, own->late[--own->late_count]);
}

void caller_train(void *argument) {
  caller *own = argument;
  run *in = own->run;
  fdp_deadline_exchange(in->stalls ? DEADLINE_MS : 0);
  own->lost_ms = sim_lost_ms(in->world);
  for (int32_t i = 0; i < own->step_count && !in->is_refused; ++i) {
    step *now = run_keep(in, sizeof *now);
    step_plan(own, now);
    bool is_late = false;
    if (step_run(own, now)) {
      in->done_steps += 1;
      in->several_steps += spans_devices(own);
    } else {
      in->failed_steps += 1;
      is_late = sim_is_stalled(in->world);
      in->late_steps += is_late;
      /* Others use the scratch of the failed call before its caller has waited for anything. */
      for (uint64_t k = sim_choose(in->world, 64); k > 0; --k) sim_yield(in->world);
      sim_run(in->world);
      caller_tell(own);
    }
    if (is_late) {
      own->late[own->late_count++] = now;
    } else {
      step_free(own, now);
    }
    if (sim_choose(in->world, 4) == 0) { /* as when memory is short */
      fdp_device *device = in->devices[sim_choose(in->world, (uint64_t)in->device_count)];
      fdp_pool_trim(fdp_context_pool(in->context, device));
    }
  }
  fdp_deadline_exchange(0);
}

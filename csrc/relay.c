#include "relay.h"

static int64_t copy_bytes(const fdp_strided_copy *copy) {
  int64_t size_bytes = copy->item_bytes;
  for (int32_t d = 0; d < copy->ndim; ++d) size_bytes *= copy->shape[d];
  return size_bytes;
}

static int64_t room_bytes(const fdp_strided_copy *copy) {
  int64_t mask = FDP_ALIGNMENT_BYTES - 1;
  return (copy_bytes(copy) + mask) & ~mask;
}

int64_t fdp_relay_size_bytes(const fdp_strided_copy *copies, int32_t copy_count) {
  int64_t size_bytes = 0;
  for (int32_t i = 0; i < copy_count; ++i) size_bytes += room_bytes(&copies[i]);
  return size_bytes;
}

/* `own` are the strides of the side that stays; the flat side is packed. */
static fdp_strided_copy half_of(const fdp_strided_copy *copy, fdp_relay_half half, char *flat) {
  bool gathers = half == FDP_RELAY_GATHER;
  const int64_t *own = gathers ? copy->source_strides_bytes : copy->target_strides_bytes;
  fdp_strided_copy made = *copy;
  int64_t *packed = gathers ? made.target_strides_bytes : made.source_strides_bytes;
  if (gathers) {
    made.target = flat;
  } else {
    made.source = flat;
  }
  bool is_plain = true;
  int64_t stride_bytes = copy->item_bytes;
  for (int32_t d = copy->ndim - 1; d >= 0; --d) {
    if (own[d] != stride_bytes && copy->shape[d] != 1) is_plain = false;
    packed[d] = stride_bytes;
    stride_bytes *= copy->shape[d];
  }
  if (is_plain) {
    made.item_bytes = stride_bytes;
    made.ndim = 0;
  }
  return made;
}

void fdp_relay_plan(const fdp_strided_copy *copies, int32_t copy_count, fdp_relay_half half,
                    void *flat, fdp_strided_copy *halves) {
  char *at = flat;
  for (int32_t i = 0; i < copy_count; ++i) {
    halves[i] = half_of(&copies[i], half, at);
    at += room_bytes(&copies[i]);
  }
}

bool fdp_relay_is_plain(const fdp_strided_copy *copies, int32_t copy_count) {
  for (int32_t i = 0; i < copy_count; ++i) {
    if (copies[i].ndim != 0) return false;
  }
  return true;
}

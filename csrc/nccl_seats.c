#include "nccl_seats.h"

#include <stdio.h>

typedef struct seat_row {
  fdp_device *device;
  int32_t seat_count;
  int32_t first;
} seat_row;

typedef struct seat_rows {
  seat_row rows[FDP_NCCL_MAX_SEATS]; /* by ordinal */
  int32_t count;
} seat_rows;

static seat_row *row_of(seat_rows *rows, fdp_device *device) {
  int32_t at = 0;
  while (at < rows->count && rows->rows[at].device != device) ++at;
  if (at < rows->count) return &rows->rows[at];
  rows->count += 1;
  for (; at > 0 && rows->rows[at - 1].device->id.ordinal > device->id.ordinal; --at) {
    rows->rows[at] = rows->rows[at - 1];
  }
  rows->rows[at] = (seat_row){device, 0, 0};
  return &rows->rows[at];
}

void fdp_nccl_seats_plan(const fdp_endpoint *home, const fdp_endpoint *others, int32_t other_count,
                         bool may_repeat, fdp_nccl_seats *seats) {
  seat_rows rows = {.count = 0};
  seats->count = 0;
  row_of(&rows, home->device)->seat_count = 1;
  bool home_is_shared = false;
  for (int32_t i = 0; i < other_count; ++i) {
    seat_row *row = row_of(&rows, others[i].device);
    bool shares = row->seat_count > 0 && !may_repeat;
    if (others[i].device == home->device && !home_is_shared) shares = home_is_shared = true;
    if (!shares) row->seat_count += 1;
    seats->others[i] = row->seat_count - 1; /* among those of its device, so far */
  }
  for (int32_t k = 0; k < rows.count; ++k) {
    rows.rows[k].first = seats->count;
    for (int32_t i = 0; i < rows.rows[k].seat_count; ++i) {
      seats->devices[seats->count++] = rows.rows[k].device;
    }
  }
  seats->home = row_of(&rows, home->device)->first;
  for (int32_t i = 0; i < other_count; ++i) {
    seats->others[i] += row_of(&rows, others[i].device)->first;
  }
}

bool fdp_nccl_seats_fit(const fdp_nccl_seats *seats, fdp_device *const *devices, int32_t count,
                        int32_t *places) {
  int32_t at = 0;
  for (int32_t i = 0; i < seats->count; ++i) {
    while (at < count && devices[at] != seats->devices[i]) ++at;
    if (at == count) return false;
    places[i] = at++;
  }
  return true;
}

const char *fdp_nccl_devices_text(fdp_device *const *devices, int32_t count, char *text,
                                  size_t size_bytes) {
  size_t used = 0;
  text[0] = '\0';
  for (int32_t i = 0; i < count && used < size_bytes; ++i) {
    char device_text[32];
    int written = snprintf(text + used, size_bytes - used, "%s%s", i > 0 ? ", " : "",
                           fdp_device_text(devices[i]->id, device_text, sizeof device_text));
    if (written > 0) used += (size_t)written;
  }
  return text;
}

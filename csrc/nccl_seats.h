/* Seats: which rank of NCCL each party of a verb is. Where a GPU may have one rank only, all
 * parties on it share a seat; where it may have several, its k-th other has the k-th seat, and home
 * shares the first. Seats are in the order of the devices' ordinals, whoever is home, so that verbs
 * of the same devices share communicators. Pure: any thread, no streams. */
#ifndef FDP_NCCL_SEATS_H
#define FDP_NCCL_SEATS_H

#include "transport.h"

#define FDP_NCCL_MAX_SEATS (FDP_MAX_REPLICAS + 1)

typedef struct fdp_nccl_seats {
  fdp_device *devices[FDP_NCCL_MAX_SEATS]; /* of each seat; a device's seats are neighbours */
  int32_t count;
  int32_t home;
  int32_t others[FDP_MAX_REPLICAS];
} fdp_nccl_seats;

void fdp_nccl_seats_plan(const fdp_endpoint *home, const fdp_endpoint *others, int32_t other_count,
                         bool may_repeat, fdp_nccl_seats *seats);
/* True if these devices, in seat order too, have room for everybody: then `places` says which of
 * them each seat is. */
bool fdp_nccl_seats_fit(const fdp_nccl_seats *seats, fdp_device *const *devices, int32_t count,
                        int32_t *places);
/* "cuda:0, cuda:1"; writes at most `size_bytes` and returns `text`. */
const char *fdp_nccl_devices_text(fdp_device *const *devices, int32_t count, char *text,
                                  size_t size_bytes);

#endif

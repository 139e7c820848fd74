/* The sum of transport_nccl.c: by NCCL's own reduce where that can do it, else gathered at home.
 * The streams are as in transport.h. */
#ifndef FDP_NCCL_SUM_H
#define FDP_NCCL_SUM_H

#include "nccl_book.h"

/* What one call works on. The session was entered with `home` and `ranks`. */
typedef struct fdp_nccl_sum {
  fdp_nccl_session *session;
  const fdp_endpoint *home;
  const fdp_endpoint *ranks;
  int32_t rank_count;
  const fdp_sum *sums; /* at least one */
  int32_t sum_count;
  char *span;
  int64_t span_bytes;
} fdp_nccl_sum;

fdp_status fdp_nccl_sum_run(const fdp_nccl_sum *work);

#endif

/* The book of NCCL: the library, once it was looked for; the sets of communicators made so far; why
 * others could not be made. One mutex guards all of it and is held from fdp_nccl_book_enter to
 * fdp_nccl_book_leave, so groups are started one at a time, in the same order on every device.
 *
 * A set that NCCL could not make is not tried again. A failure in use ends all sets, as NCCL asks
 * for; the next use makes new ones. */
#ifndef FDP_NCCL_BOOK_H
#define FDP_NCCL_BOOK_H

#include "nccl_set.h"
#include "peer_check.h"

typedef struct fdp_nccl_book fdp_nccl_book;

/* `timeout_ms` bounds each wait on the host; FDP_NCCL_TIMEOUT_MS does as well. GPUs that `peers`
 * (borrowed) found to corrupt or stall peer copies are not joined, as NCCL would make the same
 * copies, unless NCCL_P2P_DISABLE is set. */
fdp_status fdp_nccl_book_open(int64_t timeout_ms, fdp_peer_book *peers, fdp_nccl_book **book);
void fdp_nccl_book_close(fdp_nccl_book *book);

/* FDP_OK if NCCL can carry between them; FDP_UNSUPPORTED, with the reason, if not. The first time
 * for a list of devices it loads NCCL, makes communicators and connects them, and waits for that;
 * later it looks it up. */
fdp_status fdp_nccl_book_joins(fdp_nccl_book *book, const fdp_endpoint *home,
                               const fdp_endpoint *others, int32_t other_count);

/* One verb's use of NCCL. */
typedef struct fdp_nccl_session {
  fdp_nccl_book *book;
  fdp_nccl_set *set;    /* NULL if there is only one seat: nothing goes through NCCL */
  bool is_exact;        /* the set has these seats and no others */
  bool is_broken;       /* written by fdp_nccl_session_run */
  fdp_nccl_seats seats; /* numbers of the set */
} fdp_nccl_session;

/* After FDP_OK it is left again, by the same thread. First it asks what became of earlier
 * groups. */
fdp_status fdp_nccl_book_enter(fdp_nccl_book *book, const fdp_endpoint *home,
                               const fdp_endpoint *others, int32_t other_count,
                               fdp_nccl_session *session);
void fdp_nccl_book_leave(fdp_nccl_session *session);
/* As fdp_nccl_set_run. */
fdp_status fdp_nccl_session_run(fdp_nccl_session *session, const char *what,
                                const fdp_nccl_act *acts, int32_t act_count);

#endif

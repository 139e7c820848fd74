#include "peer_check.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "env.h"
#include "log.h"

#define MAX_ORDINALS 64
#define LARGEST_BYTES FDP_PEER_CHECK_BYTES

static const int64_t sizes_bytes[] = {4, LARGEST_BYTES / 256, LARGEST_BYTES / 16 + 4,
                                      LARGEST_BYTES};

typedef struct peer_pair {
  bool is_good;
  bool reaches;
  char reason[200]; /* if it is not */
} peer_pair;

struct fdp_peer_book {
  int64_t timeout_ms;
  int32_t bad_first; /* ordinals of the pair that is to fail; -1: none */
  int32_t bad_second;
  pthread_mutex_t mutex; /* guards all below */
  peer_pair *pairs[MAX_ORDINALS][MAX_ORDINALS]; /* NULL: not checked; the smaller ordinal first */
};

static fdp_status read_bad_pair(fdp_peer_book *book) {
  const char *text = fdp_env_text(FDP_ENV_TEST_BAD_PEER);
  char rest = '\0';
  book->bad_first = book->bad_second = -1;
  if (strcmp(text, "none") == 0) return FDP_OK;
  if (sscanf(text, "%" SCNd32 "-%" SCNd32 "%c", &book->bad_first, &book->bad_second, &rest) == 2 &&
      book->bad_first >= 0 && book->bad_second >= 0) {
    return FDP_OK;
  }
  return fdp_fail(FDP_INVALID_ARGUMENT, "FASTDP_TEST_BAD_PEER is \"%.100s\": must be two GPUs' "
                  "numbers, as 0-1", text);
}

fdp_status fdp_peer_book_open(int64_t timeout_ms, fdp_peer_book **book) {
  fdp_peer_book *opened = calloc(1, sizeof *opened);
  if (!opened) return fdp_fail(FDP_OUT_OF_MEMORY, "peer: no host memory");
  opened->timeout_ms =
      timeout_ms < FDP_PEER_CHECK_TIMEOUT_MS ? timeout_ms : FDP_PEER_CHECK_TIMEOUT_MS;
  fdp_status status = read_bad_pair(opened);
  if (status != FDP_OK) {
    free(opened);
    return status;
  }
  pthread_mutex_init(&opened->mutex, NULL);
  *book = opened;
  return FDP_OK;
}

void fdp_peer_book_close(fdp_peer_book *book) {
  if (!book) return;
  for (int32_t i = 0; i < MAX_ORDINALS; ++i) {
    for (int32_t k = 0; k < MAX_ORDINALS; ++k) free(book->pairs[i][k]);
  }
  pthread_mutex_destroy(&book->mutex);
  free(book);
}

/* --- the check --- */

/* One of the two. `memory` is two areas of LARGEST_BYTES. */
typedef struct check_side {
  fdp_device *device;
  fdp_stream *stream;
  fdp_event *event;
  void *memory;
} check_side;

/* `pinned` is four areas: what is sent, and what came back in three ways. */
typedef struct peer_check {
  check_side sides[2];
  char *pinned;
  bool must_fail;
} peer_check;

static fdp_status side_open(check_side *side, fdp_device *device) {
  fdp_status status;
  side->device = device;
  FDP_TRY(device->ops->stream_open(device, &side->stream));
  FDP_TRY(device->ops->event_open(device, &side->event));
  FDP_TRY(fdp_device_memory_take(device, 2 * LARGEST_BYTES, &side->memory));
done:
  return status;
}

/* Nothing runs on the side's stream any more. */
static void side_stop(check_side *side) {
  if (side->stream) side->device->ops->stream_close(side->device, side->stream);
}

/* When both have stopped: each works on the other's memory. */
static void side_close(check_side *side) {
  if (side->memory) side->device->ops->memory_drop(side->device, side->memory);
  if (side->event) side->device->ops->event_close(side->device, side->event);
}

static fdp_status after(check_side *first, check_side *then) {
  fdp_status status =
      first->device->ops->event_record(first->device, first->event, first->stream);
  if (status != FDP_OK) return status;
  return then->device->ops->stream_wait(then->device, then->stream, first->event);
}

static fdp_status wait_here(check_side *side, int64_t timeout_ms) {
  fdp_device *device = side->device;
  fdp_status status = device->ops->event_record(device, side->event, side->stream);
  if (status != FDP_OK) return status;
  return device->ops->event_synchronize(device, side->event, timeout_ms, NULL);
}

/* The pattern goes to the owner; the reader copies it by copy engine and by kernel, and writes it
 * back into the owner's other area by kernel. All three come back to the host. */
static fdp_status enqueue(peer_check *check, check_side *reader, check_side *owner,
                          int64_t size_bytes) {
  const fdp_device_ops *ops = reader->device->ops;
  char *sent = check->pinned;
  char *owned = owner->memory, *written = owned + LARGEST_BYTES;
  char *copied = reader->memory, *read = copied + LARGEST_BYTES;
  fdp_segment read_segment = {owned, 0, size_bytes};
  fdp_segment write_segment = {written, 0, size_bytes};
  fdp_status status;
  FDP_TRY(ops->copy(owner->device, owner->stream, owned, sent, size_bytes));
  FDP_TRY(after(owner, reader));
  FDP_TRY(ops->copy(reader->device, reader->stream, copied, owned, size_bytes));
  FDP_TRY(ops->pack(reader->device, reader->stream, read, &read_segment, 1));
  FDP_TRY(ops->unpack(reader->device, reader->stream, copied, &write_segment, 1));
  FDP_TRY(ops->copy(reader->device, reader->stream, sent + LARGEST_BYTES, copied, size_bytes));
  FDP_TRY(ops->copy(reader->device, reader->stream, sent + 2 * LARGEST_BYTES, read, size_bytes));
  FDP_TRY(after(reader, owner));
  FDP_TRY(ops->copy(owner->device, owner->stream, sent + 3 * LARGEST_BYTES, written, size_bytes));
done:
  return status;
}

static fdp_status compare(const char *sent, int64_t size_bytes, const check_side *reader,
                          const check_side *owner) {
  static const char *const ways[] = {"copied", "read by a kernel", "written by a kernel"};
  for (int32_t way = 0; way < 3; ++way) {
    const char *got = sent + (way + 1) * LARGEST_BYTES;
    for (int64_t i = 0; i < size_bytes; ++i) {
      if (got[i] == sent[i]) continue;
      char reader_text[32], owner_text[32];
      return fdp_fail(FDP_DEVICE_ERROR, "%" PRId64 " bytes %s by %s in memory of %s are wrong from "
                      "byte %" PRId64 " on", size_bytes, ways[way],
                      fdp_device_text(reader->device->id, reader_text, sizeof reader_text),
                      fdp_device_text(owner->device->id, owner_text, sizeof owner_text), i);
    }
  }
  return FDP_OK;
}

static void make_pattern(char *pinned, int64_t size_bytes, uint32_t seed) {
  uint32_t state = seed * 2654435761u + 1;
  for (int64_t i = 0; i < size_bytes; ++i) { /* xorshift32 */
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    pinned[i] = (char)(state >> 24);
  }
  for (int32_t way = 1; way <= 3; ++way) {
    for (int64_t i = 0; i < size_bytes; ++i) pinned[way * LARGEST_BYTES + i] = (char)~pinned[i];
  }
}

static fdp_status check_way(peer_check *check, int32_t way, int64_t timeout_ms) {
  check_side *reader = &check->sides[way], *owner = &check->sides[1 - way];
  fdp_status status = FDP_OK;
  for (size_t i = 0; i < sizeof sizes_bytes / sizeof sizes_bytes[0]; ++i) {
    make_pattern(check->pinned, sizes_bytes[i], (uint32_t)(2 * i) + (uint32_t)way);
    FDP_TRY(enqueue(check, reader, owner, sizes_bytes[i]));
    FDP_TRY(wait_here(owner, timeout_ms)); /* which waits for the reader in the end */
    if (check->must_fail) check->pinned[LARGEST_BYTES + sizes_bytes[i] / 2] ^= 1;
    FDP_TRY(compare(check->pinned, sizes_bytes[i], reader, owner));
  }
done:
  return status;
}

/* After a stall nothing is closed: to free what the hardware still works on would wait for it, for
 * ever. */
static fdp_status run_check(const fdp_peer_book *book, fdp_device *a, fdp_device *b) {
  peer_check check = {0};
  void *pinned = NULL;
  fdp_status status;
  FDP_TRY(side_open(&check.sides[0], a));
  FDP_TRY(side_open(&check.sides[1], b));
  FDP_TRY(fdp_device_pinned_take(a, 4 * LARGEST_BYTES, &pinned));
  check.pinned = pinned;
  int32_t x = a->id.ordinal, y = b->id.ordinal;
  check.must_fail = (x == book->bad_first && y == book->bad_second) ||
                    (y == book->bad_first && x == book->bad_second);
  FDP_TRY(check_way(&check, 0, book->timeout_ms));
  FDP_TRY(check_way(&check, 1, book->timeout_ms));
done:
  if (status == FDP_TIMED_OUT) return status;
  fdp_message why;
  fdp_message_keep(&why);
  for (int32_t i = 0; i < 2; ++i) side_stop(&check.sides[i]);
  for (int32_t i = 0; i < 2; ++i) side_close(&check.sides[i]);
  if (pinned) a->ops->pinned_drop(a, pinned);
  fdp_message_restore(&why);
  return status;
}

/* --- the book --- */

static void write_reason(peer_pair *pair, fdp_device *a, fdp_device *b) {
  char a_text[32], b_text[32];
  snprintf(pair->reason, sizeof pair->reason, "%s and %s failed the check of peer copies: %.120s",
           fdp_device_text(a->id, a_text, sizeof a_text),
           fdp_device_text(b->id, b_text, sizeof b_text), fdp_last_message());
  fdp_log(FDP_LOG_WARNING, "%s", pair->reason);
}

/* FDP_OK: something was found out, for good or ill. */
static fdp_status look_at_locked(const fdp_peer_book *book, fdp_device *a, fdp_device *b,
                                 peer_pair *pair) {
  fdp_status status = a->ops->peer_reach(a, b);
  if (status == FDP_OK) status = b->ops->peer_reach(b, a);
  if (status == FDP_UNSUPPORTED) {
    snprintf(pair->reason, sizeof pair->reason, "%.190s", fdp_last_message());
    return FDP_OK;
  }
  if (status != FDP_OK) return status;
  pair->reaches = true;
  status = run_check(book, a, b);
  pair->is_good = status == FDP_OK;
  if (status != FDP_DEVICE_ERROR && status != FDP_TIMED_OUT) return status;
  write_reason(pair, a, b);
  return FDP_OK;
}

/* `found` is a copy of what is known. */
static fdp_status look_up(fdp_peer_book *book, fdp_device *a, fdp_device *b, peer_pair *found) {
  if (a->id.ordinal > b->id.ordinal) return look_up(book, b, a, found);
  if (a->id.ordinal < 0 || b->id.ordinal >= MAX_ORDINALS) {
    return fdp_fail(FDP_UNSUPPORTED, "only GPUs 0 to %d can be peers", MAX_ORDINALS - 1);
  }
  peer_pair *opened = NULL;
  fdp_status status = FDP_OK;
  pthread_mutex_lock(&book->mutex);
  peer_pair **known = &book->pairs[a->id.ordinal][b->id.ordinal];
  if (!*known) {
    opened = calloc(1, sizeof *opened);
    status = opened ? look_at_locked(book, a, b, opened)
                    : fdp_fail(FDP_OUT_OF_MEMORY, "peer: no host memory");
    if (status != FDP_OK) goto done;
    *known = opened;
    opened = NULL;
  }
  *found = **known;
done:
  pthread_mutex_unlock(&book->mutex);
  free(opened);
  return status;
}

fdp_status fdp_peer_book_allows(fdp_peer_book *book, fdp_device *a, fdp_device *b) {
  peer_pair pair;
  fdp_status status = look_up(book, a, b, &pair);
  if (status != FDP_OK || pair.is_good) return status;
  return fdp_fail(FDP_UNSUPPORTED, "%s", pair.reason);
}

fdp_status fdp_peer_book_trusts(fdp_peer_book *book, fdp_device *a, fdp_device *b) {
  peer_pair pair;
  fdp_status status = look_up(book, a, b, &pair);
  if (status != FDP_OK || pair.is_good || !pair.reaches) return status;
  return fdp_fail(FDP_UNSUPPORTED, "%s", pair.reason);
}

#include "nccl_book.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "limits.h"
#include "log.h"
#include "nccl_load.h"

#define MAX_SETS 32

/* A list of devices that was asked for. */
typedef struct book_entry {
  fdp_device *devices[FDP_NCCL_MAX_SEATS];
  int32_t count;
  fdp_nccl_set *set; /* NULL: `reason`, or it was ended and has to be made anew */
  char reason[FDP_MESSAGE_BYTES / 4];
} book_entry;

/* What the environment says, read at the first use between GPUs. CUDA and NCCL read it once
 * too; and later reads, without Python's lock, could meet a thread that changes it. */
typedef struct book_environment {
  bool is_read;
  bool launches_block;   /* CUDA_LAUNCH_BLOCKING */
  bool is_nonblocking;   /* NCCL_COMM_BLOCKING=0 */
  bool wants_many_ranks; /* several on one GPU; without that, replicas on it share a rank */
  bool is_without_nvls;
} book_environment;

struct fdp_nccl_book {
  int64_t timeout_ms;
  fdp_peer_book *peers;
  pthread_mutex_t mutex; /* guards all below */
  book_environment environment;
  bool is_looked_for;
  bool is_found;
  char missing[FDP_MESSAGE_BYTES]; /* if it was looked for and not found */
  fdp_nccl_library library;
  book_entry *entries[MAX_SETS];
  int32_t entry_count;
  const fdp_nccl_set *last; /* what the last group ran on */
};

fdp_status fdp_nccl_book_open(int64_t timeout_ms, fdp_peer_book *peers, fdp_nccl_book **book) {
  fdp_nccl_book *opened = calloc(1, sizeof *opened);
  if (!opened) return fdp_fail(FDP_OUT_OF_MEMORY, "nccl: no host memory");
  opened->timeout_ms = timeout_ms < FDP_NCCL_TIMEOUT_MS ? timeout_ms : FDP_NCCL_TIMEOUT_MS;
  opened->peers = peers;
  pthread_mutex_init(&opened->mutex, NULL);
  *book = opened;
  return FDP_OK;
}

static void end_set_locked(fdp_nccl_book *book, book_entry *entry, bool aborts) {
  if (book->last == entry->set) book->last = NULL;
  fdp_nccl_set_close(entry->set, aborts, book->timeout_ms);
  entry->set = NULL;
}

static void end_all_locked(fdp_nccl_book *book) {
  for (int32_t i = 0; i < book->entry_count; ++i) end_set_locked(book, book->entries[i], true);
}

void fdp_nccl_book_close(fdp_nccl_book *book) {
  if (!book) return;
  for (int32_t i = 0; i < book->entry_count; ++i) {
    end_set_locked(book, book->entries[i], false);
    free(book->entries[i]);
  }
  pthread_mutex_destroy(&book->mutex);
  free(book);
}

/* --- what has to be there --- */

static bool is_on(const char *name) {
  const char *text = getenv(name);
  return text && *text && strcmp(text, "0") != 0;
}

static bool is_zero(const char *name) {
  const char *text = getenv(name);
  return text && strcmp(text, "0") == 0;
}

static void read_environment_locked(fdp_nccl_book *book) {
  if (book->environment.is_read) return;
  book->environment = (book_environment){
      .is_read = true,
      .launches_block = is_on("CUDA_LAUNCH_BLOCKING"),
      .is_nonblocking = is_zero("NCCL_COMM_BLOCKING"),
      .wants_many_ranks = is_on("NCCL_MULTI_RANK_GPU_ENABLE"),
      .is_without_nvls = is_zero("NCCL_NVLS_ENABLE"),
  };
}

static bool fits_environment_locked(fdp_nccl_book *book, char *reason, size_t reason_bytes) {
  const book_environment *environment = &book->environment;
  const char *why = NULL;
  read_environment_locked(book);
  if (environment->launches_block) {
    why = "CUDA_LAUNCH_BLOCKING is set: one thread that launches for several GPUs, each launch "
          "waiting for its end, would wait for ever";
  } else if (environment->is_nonblocking) {
    why = "NCCL_COMM_BLOCKING is 0, must not be: communicators that do not block start a thread "
          "for each group";
  }
  if (why) snprintf(reason, reason_bytes, "%s", why);
  return !why;
}

static bool find_library_locked(fdp_nccl_book *book, char *reason, size_t reason_bytes) {
  if (!book->is_looked_for) {
    book->is_looked_for = true;
    book->is_found = fdp_nccl_load(&book->library) == FDP_OK;
    if (!book->is_found) snprintf(book->missing, sizeof book->missing, "%s", fdp_last_message());
  }
  if (!book->is_found) snprintf(reason, reason_bytes, "%s", book->missing);
  return book->is_found;
}

static bool repeats(const fdp_nccl_seats *seats) {
  for (int32_t i = 1; i < seats->count; ++i) {
    if (seats->devices[i] == seats->devices[i - 1]) return true;
  }
  return false;
}

/* NCCL 2.30 cannot connect GPUs that have different numbers of ranks ("Message truncated"). */
static bool is_even(const fdp_nccl_seats *seats) {
  int32_t first_count = 1, count = 1;
  for (int32_t i = 1; i <= seats->count; ++i) {
    if (i < seats->count && seats->devices[i] == seats->devices[i - 1]) {
      count += 1;
      continue;
    }
    if (i == count) first_count = count;
    if (count != first_count) return false;
    count = 1;
  }
  return true;
}

/* NVLS, on by default, breaks down with several ranks on a GPU, and NCCL notices only for some
 * lists of them. It reads its environment once, so it is not for fastdp to change. */
static bool can_repeat_locked(const fdp_nccl_book *book, const fdp_nccl_seats *seats, char *reason,
                              size_t reason_bytes) {
  char device[32], version[32];
  if (!repeats(seats)) return true;
  fdp_device_text(seats->devices[0]->id, device, sizeof device);
  fdp_nccl_version_text(book->library.version, version, sizeof version);
  if (book->library.version < FDP_NCCL_MULTI_RANK) {
    snprintf(reason, reason_bytes, "NCCL_MULTI_RANK_GPU_ENABLE is set and a GPU is listed several "
             "times, but NCCL is %s, must be 2.30 or newer for that (%.100s)", version,
             book->library.path);
    return false;
  }
  if (!book->environment.is_without_nvls) {
    snprintf(reason, reason_bytes, "NCCL_MULTI_RANK_GPU_ENABLE is set and a GPU is listed several "
             "times: NCCL_NVLS_ENABLE must be 0 for that");
    return false;
  }
  return true;
}

static bool is_one_backend(const fdp_endpoint *home, const fdp_endpoint *others,
                           int32_t other_count, char *reason, size_t reason_bytes) {
  for (int32_t i = -1; i < other_count; ++i) {
    fdp_device *device = i < 0 ? home->device : others[i].device;
    if (device->id.kind == FDP_DEVICE_CUDA && device->ops == home->device->ops) continue;
    char text[32];
    snprintf(reason, reason_bytes, "%s is no GPU", fdp_device_text(device->id, text, sizeof text));
    return false;
  }
  return true;
}

/* --- sets --- */

static bool is_list_of(const book_entry *entry, const fdp_nccl_seats *seats) {
  size_t size_bytes = (size_t)seats->count * sizeof seats->devices[0];
  return entry->count == seats->count && memcmp(entry->devices, seats->devices, size_bytes) == 0;
}

/* What NCCL or the devices said, which they would say again. */
static bool is_finding(fdp_status status) {
  return status == FDP_DEVICE_ERROR || status == FDP_TIMED_OUT;
}

/* Notes why there is no set for these devices. */
static void keep_reason(book_entry *entry, fdp_status status) {
  if (!is_finding(status)) return;
  snprintf(entry->reason, sizeof entry->reason, "%s", fdp_last_message());
  fdp_log(FDP_LOG_WARNING, "%s", entry->reason);
}

static fdp_status check_peers(const fdp_nccl_book *book, const book_entry *entry) {
  fdp_status status = FDP_OK;
  for (int32_t i = 0; i < entry->count && !is_on("NCCL_P2P_DISABLE"); ++i) {
    for (int32_t k = i + 1; k < entry->count; ++k) {
      if (entry->devices[i] == entry->devices[k]) continue;
      FDP_TRY(fdp_peer_book_trusts(book->peers, entry->devices[i], entry->devices[k]));
    }
  }
done:
  return status;
}

static fdp_status make_set_locked(fdp_nccl_book *book, book_entry *entry) {
  char devices[200], version[32];
  fdp_status status = check_peers(book, entry);
  if (status != FDP_OK) return status; /* the book of peers keeps it */
  status = fdp_nccl_set_open(&book->library.table, entry->devices, entry->count, book->timeout_ms,
                             &entry->set);
  if (status != FDP_OK) {
    keep_reason(entry, status);
    return status;
  }
  fdp_log(FDP_LOG_INFO, "nccl: communicators of NCCL %s for %s",
          fdp_nccl_version_text(book->library.version, version, sizeof version),
          fdp_nccl_devices_text(entry->devices, entry->count, devices, sizeof devices));
  return FDP_OK;
}

/* The set of exactly these devices, or a larger one that is there already: communicators cost
 * seconds and hundreds of megabytes, and lists vary when a replica has nothing to do. */
static fdp_status find_set_locked(fdp_nccl_book *book, const fdp_nccl_seats *seats,
                                  book_entry **found) {
  book_entry *own = NULL;
  int32_t places[FDP_NCCL_MAX_SEATS];
  for (int32_t i = 0; i < book->entry_count; ++i) {
    if (is_list_of(book->entries[i], seats)) own = book->entries[i];
  }
  for (int32_t i = 0; i < book->entry_count && (!own || !own->set); ++i) {
    book_entry *entry = book->entries[i];
    if (!entry->set || !fdp_nccl_seats_fit(seats, entry->devices, entry->count, places)) continue;
    *found = entry;
    return FDP_OK;
  }
  if (own && own->reason[0]) return fdp_fail(FDP_UNSUPPORTED, "%s", own->reason);
  if (!own && book->entry_count == MAX_SETS) {
    return fdp_fail(FDP_UNSUPPORTED, "nccl: more than %d lists of devices", MAX_SETS);
  }
  if (!own) {
    own = calloc(1, sizeof *own);
    if (!own) return fdp_fail(FDP_OUT_OF_MEMORY, "nccl: no host memory for a set");
    own->count = seats->count;
    memcpy(own->devices, seats->devices, (size_t)seats->count * sizeof seats->devices[0]);
    book->entries[book->entry_count++] = own;
  }
  *found = own;
  return own->set ? FDP_OK : make_set_locked(book, own);
}

static fdp_status connect_locked(fdp_nccl_book *book, book_entry *entry, int32_t home) {
  fdp_status status = fdp_nccl_set_connect(entry->set, book->last, home, book->timeout_ms);
  if (status == FDP_OK) return FDP_OK;
  fdp_message why;
  fdp_message_keep(&why);
  keep_reason(entry, status);
  end_set_locked(book, entry, true);
  fdp_message_restore(&why);
  return status;
}

/* Plans the seats, and has the set ready. */
static fdp_status ready_locked(fdp_nccl_session *session, const fdp_endpoint *home,
                               const fdp_endpoint *others, int32_t other_count) {
  fdp_nccl_book *book = session->book;
  fdp_nccl_seats *seats = &session->seats;
  char reason[FDP_MESSAGE_BYTES];
  book_entry *entry = NULL;
  int32_t places[FDP_NCCL_MAX_SEATS];
  if (!is_one_backend(home, others, other_count, reason, sizeof reason) ||
      !fits_environment_locked(book, reason, sizeof reason) ||
      !find_library_locked(book, reason, sizeof reason)) {
    return fdp_fail(FDP_UNSUPPORTED, "%s", reason);
  }
  bool may_repeat = book->environment.wants_many_ranks;
  fdp_nccl_seats_plan(home, others, other_count, may_repeat, seats);
  if (!is_even(seats)) fdp_nccl_seats_plan(home, others, other_count, false, seats);
  if (!can_repeat_locked(book, seats, reason, sizeof reason)) {
    return fdp_fail(FDP_UNSUPPORTED, "%s", reason);
  }
  if (seats->count == 1) return FDP_OK;
  fdp_status status = find_set_locked(book, seats, &entry);
  if (status != FDP_OK) return status;
  fdp_nccl_seats_fit(seats, entry->devices, entry->count, places);
  session->is_exact = entry->count == seats->count;
  seats->home = places[seats->home];
  for (int32_t i = 0; i < other_count; ++i) seats->others[i] = places[seats->others[i]];
  status = connect_locked(book, entry, seats->home);
  session->set = entry->set;
  return status;
}

fdp_status fdp_nccl_book_joins(fdp_nccl_book *book, const fdp_endpoint *home,
                               const fdp_endpoint *others, int32_t other_count) {
  fdp_nccl_session session = {.book = book};
  pthread_mutex_lock(&book->mutex);
  fdp_status status = ready_locked(&session, home, others, other_count);
  pthread_mutex_unlock(&book->mutex);
  return is_finding(status) ? fdp_fail(FDP_UNSUPPORTED, "%s", fdp_last_message()) : status;
}

fdp_status fdp_nccl_book_enter(fdp_nccl_book *book, const fdp_endpoint *home,
                               const fdp_endpoint *others, int32_t other_count,
                               fdp_nccl_session *session) {
  *session = (fdp_nccl_session){.book = book};
  pthread_mutex_lock(&book->mutex);
  fdp_status status = ready_locked(session, home, others, other_count);
  if (status == FDP_OK && session->set) {
    status = fdp_nccl_set_check(session->set);
    session->is_broken = status != FDP_OK;
  }
  if (status != FDP_OK) fdp_nccl_book_leave(session);
  return status;
}

void fdp_nccl_book_leave(fdp_nccl_session *session) {
  if (session->is_broken) {
    fdp_message why;
    fdp_message_keep(&why);
    end_all_locked(session->book);
    fdp_message_restore(&why);
  }
  pthread_mutex_unlock(&session->book->mutex);
}

fdp_status fdp_nccl_session_run(fdp_nccl_session *session, const char *what,
                                const fdp_nccl_act *acts, int32_t act_count) {
  fdp_status status = fdp_nccl_set_run(session->set, session->book->last, what, acts, act_count,
                                       &session->is_broken);
  if (status == FDP_OK && act_count > 0) session->book->last = session->set;
  return status;
}

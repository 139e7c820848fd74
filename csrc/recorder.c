#include "recorder.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "clock.h"

_Static_assert((FDP_RECORDER_LENGTH & (FDP_RECORDER_LENGTH - 1)) == 0, "a power of two");

/* What a place of the ring holds. `word` is the record's number and its state, and guards the rest:
 * whoever turns it to WRITING owns the place until it is RUNNING. */
typedef struct recorder_place {
  _Atomic uint64_t word; /* number << 8 | state; 0: nothing yet */
  _Atomic uint64_t kinds; /* bucket << 32 | others << 16 | verb */
  _Atomic int64_t size_bytes;
  _Atomic uint64_t device; /* ordinal << 32 | kind */
  _Atomic uintptr_t stream;
  _Atomic int64_t started_ns;
} recorder_place;

enum { WRITING = 254, RUNNING = 255 }; /* any other state is the fdp_status of the end */

static recorder_place ring[FDP_RECORDER_LENGTH];
static _Atomic uint64_t last_number;

static recorder_place *place_of(uint64_t number) {
  return &ring[number & (FDP_RECORDER_LENGTH - 1)];
}

int64_t fdp_recorder_begin(fdp_verb verb, int32_t bucket, int64_t size_bytes, fdp_device_id device,
                           const void *stream, int32_t other_count) {
  uint64_t number = atomic_fetch_add_explicit(&last_number, 1, memory_order_relaxed) + 1;
  recorder_place *place = place_of(number);
  uint64_t word = atomic_load_explicit(&place->word, memory_order_relaxed);
  if ((word & 255) == WRITING || word >> 8 > number) return 0;
  if (!atomic_compare_exchange_strong_explicit(&place->word, &word, number << 8 | WRITING,
                                               memory_order_acquire, memory_order_relaxed)) {
    return 0;
  }
  /* Releases: a reader that sees one of these sees WRITING too, or what came after. */
  uint64_t kinds = (uint64_t)(uint32_t)bucket << 32 | (uint64_t)(uint16_t)other_count << 16 | verb;
  atomic_store_explicit(&place->kinds, kinds, memory_order_release);
  atomic_store_explicit(&place->size_bytes, size_bytes, memory_order_release);
  atomic_store_explicit(&place->device, (uint64_t)(uint32_t)device.ordinal << 32 |
                        (uint32_t)device.kind, memory_order_release);
  atomic_store_explicit(&place->stream, (uintptr_t)stream, memory_order_release);
  atomic_store_explicit(&place->started_ns, fdp_clock_coarse_ns(), memory_order_release);
  atomic_store_explicit(&place->word, number << 8 | RUNNING, memory_order_release);
  return (int64_t)number;
}

void fdp_recorder_end(int64_t number, fdp_status status) {
  if (number == 0) return;
  /* Only if the place is still this record's. */
  uint64_t word = (uint64_t)number << 8 | RUNNING;
  atomic_compare_exchange_strong_explicit(&place_of((uint64_t)number)->word, &word,
                                          (uint64_t)number << 8 | (uint64_t)status,
                                          memory_order_release, memory_order_relaxed);
}

/* False if that record is not there, or not whole. */
static bool read_place(uint64_t number, fdp_record *record) {
  recorder_place *place = place_of(number);
  uint64_t word = atomic_load_explicit(&place->word, memory_order_acquire);
  if (word >> 8 != number || (word & 255) == WRITING) return false;
  uint64_t kinds = atomic_load_explicit(&place->kinds, memory_order_acquire);
  uint64_t device = atomic_load_explicit(&place->device, memory_order_acquire);
  record->size_bytes = atomic_load_explicit(&place->size_bytes, memory_order_acquire);
  record->stream = (const void *)atomic_load_explicit(&place->stream, memory_order_acquire);
  record->started_ns = atomic_load_explicit(&place->started_ns, memory_order_acquire);
  word = atomic_load_explicit(&place->word, memory_order_relaxed); /* its end may have come */
  if (word >> 8 != number || (word & 255) == WRITING) return false;
  record->number = (int64_t)number;
  record->verb = (fdp_verb)(kinds & 0xffff);
  record->other_count = (int32_t)(kinds >> 16 & 0xffff);
  record->bucket = (int32_t)(kinds >> 32);
  record->device = (fdp_device_id){(int32_t)(uint32_t)device, (int32_t)(device >> 32)};
  record->is_running = (word & 255) == RUNNING;
  record->status = record->is_running ? FDP_OK : (fdp_status)(word & 255);
  return true;
}

static uint64_t first_number(uint64_t last) {
  return last > FDP_RECORDER_LENGTH ? last - FDP_RECORDER_LENGTH + 1 : 1;
}

int32_t fdp_recorder_read(fdp_record *records) {
  uint64_t last = atomic_load_explicit(&last_number, memory_order_acquire);
  int32_t count = 0;
  for (uint64_t number = first_number(last); number <= last; ++number) {
    if (read_place(number, &records[count])) ++count;
  }
  return count;
}

/* --- text, without the C library's formats, which a signal handler may not call --- */

typedef struct recorder_text {
  char *at;
  size_t left; /* the terminating zero aside */
} recorder_text;

static void add(recorder_text *text, const char *words) {
  while (*words != '\0' && text->left > 0) {
    *text->at++ = *words++;
    text->left -= 1;
  }
}

static void add_number(recorder_text *text, uint64_t number, unsigned base) {
  char digits[24];
  char *at = digits + sizeof digits - 1;
  *at = '\0';
  do {
    *--at = "0123456789abcdef"[number % base];
    number /= base;
  } while (number > 0);
  add(text, at);
}

static void add_labelled(recorder_text *text, const char *label, int64_t number) {
  add(text, label);
  if (number < 0) add(text, "-");
  add_number(text, number < 0 ? -(uint64_t)number : (uint64_t)number, 10);
}

static void add_device(recorder_text *text, fdp_device_id device) {
  bool is_cuda = device.kind == FDP_DEVICE_CUDA;
  add_labelled(text, is_cuda ? " on cuda:" : " on cpu:", device.ordinal);
}

static void add_record(recorder_text *text, const fdp_record *record, int64_t time_ns) {
  add_labelled(text, "#", record->number);
  add(text, " ");
  add(text, fdp_verb_name(record->verb));
  if (record->bucket != 0) add_labelled(text, " of bucket ", record->bucket);
  add_labelled(text, ", ", record->size_bytes);
  add(text, " bytes");
  add_device(text, record->device);
  add(text, " stream 0x");
  add_number(text, (uintptr_t)record->stream, 16);
  add_labelled(text, ", others: ", record->other_count);
  add_labelled(text, ", ", (time_ns - record->started_ns) / 1000000);
  add(text, " ms ago: ");
  if (record->is_running) {
    add(text, "running");
  } else if (record->status == FDP_OK) {
    add(text, "enqueued");
  } else {
    add(text, "failed, ");
    add(text, fdp_status_name(record->status));
  }
  add(text, "\n");
}

const char *fdp_recorder_text(char *text, size_t size_bytes) {
  if (size_bytes == 0) return text;
  recorder_text written = {text, size_bytes - 1};
  uint64_t last = atomic_load_explicit(&last_number, memory_order_acquire);
  int64_t time_ns = fdp_clock_coarse_ns();
  add_labelled(&written, "fastdp's last operations, of ", (int64_t)last);
  add(&written, ":\n");
  for (uint64_t number = first_number(last); number <= last; ++number) {
    fdp_record record;
    if (read_place(number, &record)) add_record(&written, &record, time_ns);
  }
  *written.at = '\0';
  return text;
}

static void on_signal(int signal_number) {
  static char text[FDP_RECORDER_TEXT_BYTES]; /* too large for the stack that a signal may meet */
  static atomic_flag is_taken = ATOMIC_FLAG_INIT;
  int error = errno;
  (void)signal_number;
  if (atomic_flag_test_and_set(&is_taken)) return;
  fdp_recorder_text(text, sizeof text);
  size_t left = strlen(text);
  for (const char *at = text; left > 0;) {
    ssize_t count = write(STDERR_FILENO, at, left);
    if (count < 0 && errno != EINTR) break;
    if (count > 0) {
      at += count;
      left -= (size_t)count;
    }
  }
  atomic_flag_clear(&is_taken);
  errno = error;
}

fdp_status fdp_recorder_on_signal(void) {
  struct sigaction former;
  struct sigaction wanted = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
  sigemptyset(&wanted.sa_mask);
  if (sigaction(SIGUSR1, NULL, &former) != 0) {
    return fdp_fail(FDP_UNSUPPORTED, "SIGUSR1: its handler cannot be read: %s", strerror(errno));
  }
  if (former.sa_handler == on_signal) return FDP_OK;
  if (former.sa_handler != SIG_DFL) {
    return fdp_fail(FDP_UNSUPPORTED, "SIGUSR1: somebody else handles it already");
  }
  if (sigaction(SIGUSR1, &wanted, NULL) != 0) {
    return fdp_fail(FDP_UNSUPPORTED, "SIGUSR1: no handler can be set: %s", strerror(errno));
  }
  return FDP_OK;
}

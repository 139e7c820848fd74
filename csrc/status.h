/* The one status enum and the message that goes with it. Every function of the core that can fail
 * returns fdp_status; the message is written once, where the error is born, into a buffer of the
 * calling thread, and stays until that thread's next failure. Any thread may call. No streams. */
#ifndef FDP_STATUS_H
#define FDP_STATUS_H

#include "limits.h"

typedef enum fdp_status {
  FDP_OK = 0,
  FDP_INVALID_ARGUMENT, /* the caller's mistake: message names argument, value and bound */
  FDP_INVALID_TYPE,     /* the caller's mistake: wrong dtype */
  FDP_OUT_OF_MEMORY,    /* the device or the host has no memory left */
  FDP_TIMED_OUT,        /* a host wait passed its deadline */
  FDP_ABORTED,          /* a host wait was told to stop */
  FDP_DEVICE_ERROR,     /* the device or its driver reported a failure */
  FDP_UNSUPPORTED,      /* this build or machine cannot do it: message says what is missing */
  FDP_FAULT_INJECTED    /* a test asked for this failure (fault.h) */
} fdp_status;

/* Writes the message and returns `code`, so that a caller can `return fdp_fail(...)`. */
fdp_status fdp_fail(fdp_status code, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* The calling thread's last message; "" when it never failed. Valid until its next failure. */
const char *fdp_last_message(void);

/* A message that is kept: over what follows a failure and may fail in its turn, such as giving
 * buffers back, or from one thread to another. */
typedef struct fdp_message {
  char text[FDP_MESSAGE_BYTES];
} fdp_message;

/* The calling thread's last message, kept; and made its last message again. */
void fdp_message_keep(fdp_message *kept);
void fdp_message_restore(const fdp_message *kept);

/* "invalid argument", "out of memory", ... for logs and tests. */
const char *fdp_status_name(fdp_status status);

/* Passes a failure on: the only macro of control flow in the core. `status` is a local and `done`
 * the cleanup label of the calling function. */
#define FDP_TRY(call)                   \
  do {                                  \
    status = (call);                    \
    if (status != FDP_OK) goto done;    \
  } while (0)

#endif

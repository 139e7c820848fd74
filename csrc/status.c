#include "status.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char last_message[FDP_MESSAGE_BYTES];

fdp_status fdp_fail(fdp_status code, const char *format, ...) {
  /* Formatted aside first: an argument may be the message of an earlier failure. */
  char message[FDP_MESSAGE_BYTES];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  snprintf(last_message, sizeof last_message, "%s", message);
  return code;
}

const char *fdp_last_message(void) { return last_message; }

void fdp_message_keep(fdp_message *kept) {
  snprintf(kept->text, sizeof kept->text, "%s", last_message);
}

void fdp_message_restore(const fdp_message *kept) {
  snprintf(last_message, sizeof last_message, "%s", kept->text);
}

const char *fdp_status_name(fdp_status status) {
  switch (status) {
    case FDP_OK: return "ok";
    case FDP_INVALID_ARGUMENT: return "invalid argument";
    case FDP_INVALID_TYPE: return "invalid type";
    case FDP_OUT_OF_MEMORY: return "out of memory";
    case FDP_TIMED_OUT: return "timed out";
    case FDP_ABORTED: return "aborted";
    case FDP_DEVICE_ERROR: return "device error";
    case FDP_UNSUPPORTED: return "unsupported";
    case FDP_FAULT_INJECTED: return "fault injected";
  }
  return "unknown status";
}

/* Messages for people. The core never prints: it hands each message to one sink, which whoever
 * embeds it sets (the Python module passes them to `logging`). Process-wide; any thread; a
 * child of fork may go on with it. Below the level a message costs one relaxed atomic load. No
 * streams. */
#ifndef FDP_LOG_H
#define FDP_LOG_H

#include <stdbool.h>

#include "status.h"

typedef enum fdp_log_level {
  FDP_LOG_OFF,
  FDP_LOG_ERROR,
  FDP_LOG_WARNING,
  FDP_LOG_INFO,
  FDP_LOG_DEBUG
} fdp_log_level;

/* Called on the thread that logs, with no lock of the core's own log held; `message` is valid
 * during the call. It may not call fdp_log. */
typedef void (*fdp_log_sink)(void *user, fdp_log_level level, const char *message);

/* Messages up to `level` go to `sink` from now on; a NULL sink or FDP_LOG_OFF silences. A call of
 * the old sink may still be running on another thread when this returns. */
void fdp_log_open(fdp_log_sink sink, void *user, fdp_log_level level);
/* The level that FASTDP_LOG asks for. */
fdp_status fdp_log_level_from_env(fdp_log_level *level);

/* Leaves the thread's message of a failure as it is, whatever the sink does. */
void fdp_log(fdp_log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));
bool fdp_log_enabled(fdp_log_level level);
const char *fdp_log_level_name(fdp_log_level level); /* "off", "error", ... as in FASTDP_LOG */

#endif

/* Messages of the core (log.h) go to Python's `logging`, to the logger "fastdp", up to the level
 * that FASTDP_LOG asks for. */
#ifndef FDP_PY_LOG_H
#define FDP_PY_LOG_H

#include "py_state.h"

/* Connects the core's log. 0, or -1 with an error set when FASTDP_LOG makes no sense. */
int fdp_py_log_open(fdp_py_state *state);

#endif

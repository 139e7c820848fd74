/* Which stream a framework is working on: the framework's own current stream of the calling thread.
 * Nothing is waited for. Needs the GIL. */
#ifndef FDP_PY_STREAM_H
#define FDP_PY_STREAM_H

#include "py_state.h"

/* The current stream of `device`; NULL for the host, and where no framework tells (the legacy
 * default stream, device.h). 0, or -1 with an error set. */
int fdp_py_stream_current(fdp_py_state *state, fdp_device_id device, fdp_stream **stream);

#endif

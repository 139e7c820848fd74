/* Streams as Python sees them. Nothing is waited for. Needs the GIL. */
#ifndef FDP_PY_STREAM_H
#define FDP_PY_STREAM_H

#include "py_state.h"

/* The stream that the framework is working on: its current one of the calling thread on `device`;
 * NULL for the host, and where no framework tells (the legacy default stream, device.h). 0, or -1
 * with an error set. */
int fdp_py_stream_current(fdp_py_state *state, fdp_device_id device, fdp_stream **stream);
PyObject *fdp_py_open_stream(PyObject *module, PyObject *device);

#endif

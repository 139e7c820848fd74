/* The flight recorder (recorder.h) for Python: its text, in errors and at SIGUSR1 where FASTDP_DUMP
 * asks for that. Needs the GIL. */
#ifndef FDP_PY_RECORDER_H
#define FDP_PY_RECORDER_H

#include "py_state.h"

/* Listens for the signal if it is asked for. 0, or -1 with an error set when FASTDP_DUMP makes no
 * sense; a signal that somebody else has is a warning in the log. */
int fdp_py_recorder_open(fdp_py_state *state);

/* The message of an error of that status, which may gain the text of the recorder: if it is asked
 * for, and the error is not the caller's mistake. Takes over `message`; NULL with an error set. */
PyObject *fdp_py_recorder_add(PyObject *message, fdp_status status);

/* dump() */
PyObject *fdp_py_recorder_dump(PyObject *module, PyObject *unused);

#endif

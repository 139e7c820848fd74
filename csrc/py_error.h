/* From failures of the core to Python exceptions, and refusals that name the argument. All need the
 * GIL; none touches a stream. */
#ifndef FDP_PY_ERROR_H
#define FDP_PY_ERROR_H

#include "py_state.h"

/* Which argument is meant: "source", "targets[1]", "gradients[0][3]". Kept as numbers because the
 * text is wanted only when something is wrong. */
typedef struct fdp_py_argument {
  const char *name;
  int32_t index; /* -1: none */
  int32_t inner; /* -1: none */
} fdp_py_argument;

/* "targets[1]"; writes at most `size_bytes` bytes and returns `text`. */
const char *fdp_py_argument_text(const fdp_py_argument *argument, char *text, size_t size_bytes);

/* Makes the exception classes. 0, or -1 with an error set. */
int fdp_py_error_add(PyObject *module);

/* Raises what `status` stands for, with the core's message of this thread. Returns NULL. */
PyObject *fdp_py_raise(fdp_py_state *state, fdp_status status);

/* Raises `type` with "<argument>: <message>" (PyErr_Format's formats). Returns -1. */
int fdp_py_refuse(PyObject *type, const fdp_py_argument *argument, const char *format, ...);

/* Puts the argument's name before an error that its producer raised: BufferError stays one, any
 * other becomes TypeError; MemoryError and what is no Exception pass as they are. Returns -1. */
int fdp_py_refuse_cause(const fdp_py_argument *argument);

/* Checks the number of positional arguments. 0, or -1 with TypeError set. */
int fdp_py_expect_count(const char *function, Py_ssize_t given, Py_ssize_t wanted);

#endif

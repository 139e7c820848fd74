/* Which transport joins some devices, and why: a question for diagnostics. The first time for a
 * list of GPUs it opens them and looks at their pairs (peer_check.h), as their first verb would;
 * the GIL is released for that. */
#ifndef FDP_PY_TRANSPORT_H
#define FDP_PY_TRANSPORT_H

#include "py_compat.h"

/* METH_FASTCALL; _C.pyi has its arguments. */
PyObject *fdp_py_transport(PyObject *module, PyObject *const *arguments, Py_ssize_t count);

#endif

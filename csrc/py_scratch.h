/* What the core's scratch pools hold (pool.h), for Python: a question for diagnostics, and a way to
 * have it given back. Opens no device; the GIL is released meanwhile. */
#ifndef FDP_PY_SCRATCH_H
#define FDP_PY_SCRATCH_H

#include "py_compat.h"

/* METH_O; _C.pyi has its argument. */
PyObject *fdp_py_scratch(PyObject *module, PyObject *trim);

#endif

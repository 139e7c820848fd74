/* Asking about tensors without moving them: borrow, layout and describe as functions of the module.
 * The memory is never read. The GIL is kept: there is nothing to wait for. */
#ifndef FDP_PY_LAYOUT_H
#define FDP_PY_LAYOUT_H

#include "py_compat.h"

/* METH_O functions; _C.pyi has their arguments. */
PyObject *fdp_py_borrow_all(PyObject *module, PyObject *tensors);
PyObject *fdp_py_layout(PyObject *module, PyObject *tensor);
PyObject *fdp_py_describe(PyObject *module, PyObject *tensors);

/* A new tuple of int. */
PyObject *fdp_py_integers(const int64_t *values, int32_t count);

#endif

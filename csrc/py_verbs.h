/* The four verbs on whole tensors as functions of the module. Each does five things: hold the
 * references (the caller does), borrow, release the GIL, make one core call, raise. Work goes on
 * the stream that each tensor's framework is working on; nothing is waited for on CUDA. */
#ifndef FDP_PY_VERBS_H
#define FDP_PY_VERBS_H

#include "py_compat.h"

/* METH_FASTCALL functions; _C.pyi has their arguments. */
PyObject *fdp_py_scatter(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *fdp_py_gather(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *fdp_py_broadcast(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *fdp_py_reduce(PyObject *module, PyObject *const *arguments, Py_ssize_t count);

#endif

/* Tensors of torch's own making, made many at a time. Bucket.split: every slot of a flat buffer as
 * a tensor of the buffer's storage, where the exchange table must not be used (py_views.h): on
 * GPUs, since `record_stream` does nothing on memory that came in by it, and in a torch without
 * one; slots that differ in their first dimension only, side by side, by one call. become and
 * aliases: the classes of tensors. torch is asked by public methods only. Needs the
 * GIL; touches no stream. */
#ifndef FDP_PY_SLOTS_H
#define FDP_PY_SLOTS_H

#include "py_compat.h"

/* How a buffer is cut, kept by a bucket: made at the first split. */
typedef struct fdp_py_cuts fdp_py_cuts;

/* Lets go of them; NULL is fine. */
void fdp_py_cuts_drop(fdp_py_cuts *cuts);

/* A METH_O method of Bucket, and METH_FASTCALL functions; _C.pyi has their arguments. */
PyObject *fdp_py_bucket_split(PyObject *self, PyObject *flat);
PyObject *fdp_py_become(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *fdp_py_aliases(PyObject *module, PyObject *const *arguments, Py_ssize_t count);

#endif

/* Bucket.views: every slot of a flat buffer as a tensor, made by the exchange table of the buffer's
 * type. All of them together own one managed tensor of the buffer, which keeps its memory alive. */
#ifndef FDP_PY_VIEWS_H
#define FDP_PY_VIEWS_H

#include "py_compat.h"

/* A METH_O method of Bucket; _C.pyi has its arguments. */
PyObject *fdp_py_bucket_views(PyObject *self, PyObject *flat);

#endif

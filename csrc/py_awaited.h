/* AwaitedDict: a dictionary of a replica ("_parameters" or "_buffers") whose values are waited for
 * where they are read, by every way that Python has of reading one. The C functions of dict
 * (PyDict_Next and the like) see its entries without waiting; py_replica.c writes them so. */
#ifndef FDP_PY_AWAITED_H
#define FDP_PY_AWAITED_H

#include "py_compat.h"

/* Adds the type AwaitedDict to the module, which has the type Gate. 0, or -1 with an error set. */
int fdp_py_awaited_add(PyObject *module);

#endif

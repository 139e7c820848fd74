/* The bridge to fastdp._numpy, the one module built against NumPy's C API. It is a module of its
 * own because import_array fails where NumPy is absent: it is imported at the first NumPy argument.
 * The function travels in a capsule. Borrows; needs the GIL; touches no stream. */
#ifndef FDP_PY_NUMPY_H
#define FDP_PY_NUMPY_H

#include "py_compat.h"

#include <stdbool.h>

#include "view.h"

#define FDP_PY_NUMPY_MODULE "fastdp._numpy"
#define FDP_PY_NUMPY_ATTRIBUTE "_borrow"
#define FDP_PY_NUMPY_CAPSULE FDP_PY_NUMPY_MODULE "." FDP_PY_NUMPY_ATTRIBUTE

/* Makes `view` a window on `array`, a numpy.ndarray. Returns 0; or 1 when such an array cannot be
 * borrowed, with the reason (a new string) in `refusal`; or -1 with a Python error set. */
typedef int (*fdp_py_numpy_borrow)(PyObject *array, fdp_view *view, bool *read_only,
                                   PyObject **refusal);

#endif

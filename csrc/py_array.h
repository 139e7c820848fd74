/* The type Array: memory of the core's own that other libraries take over as DLPack. The memory
 * lives until the Array and all that was exported from it have gone; the last of them may go on any
 * thread, without the GIL. Written and read on the framework's current stream. */
#ifndef FDP_PY_ARRAY_H
#define FDP_PY_ARRAY_H

#include "py_state.h"

/* Adds the type to the module. 0, or -1 with an error set. */
int fdp_py_array_add(PyObject *module);

#endif

/* The type Handoff: a slot through which one thread hands an object to one waiting thread
 * (handoff.h). A reference goes in with put and comes out with take. */
#ifndef FDP_PY_HANDOFF_H
#define FDP_PY_HANDOFF_H

#include "py_state.h"

/* Adds the type to the module. 0, or -1 with an error set. */
int fdp_py_handoff_add(PyObject *module);

#endif

/* Gate: how far the buckets of one replica were waited for, by each stream that read them. A wait
 * is enqueued on the reader's stream, never on the host, and once per bucket and stream: copies
 * arrive in the order of their buckets, so a later bucket stands for all before it. Owns the events
 * of one forward, until the next. Needs the GIL; any thread. */
#ifndef FDP_PY_GATE_H
#define FDP_PY_GATE_H

#include "py_state.h"

/* Adds the type Gate to the module. 0, or -1 with an error set. */
int fdp_py_gate_add(PyObject *module);

/* The reader's current stream waits for `bucket`, unless it has. -1, and buckets that the forward
 * has not, are waited for by nobody. 0, or -1 with an error set; can run any code. */
int fdp_py_gate_pass(PyObject *gate, Py_ssize_t bucket);

#endif

/* What kind of thing can be borrowed, decided once for each exact type and remembered: looking an
 * attribute up on a type and walking its bases costs microseconds, a comparison of addresses
 * nothing. Needs the GIL; touches no stream. */
#ifndef FDP_PY_PRODUCER_H
#define FDP_PY_PRODUCER_H

#include "py_state.h"

/* Copies out how objects of `type` are borrowed. 0, or -1 with an error set (never for a type that
 * cannot be borrowed: that is FDP_PY_WAY_REFUSED). `producer->type` is borrowed. */
int fdp_py_producer_find(fdp_py_state *state, PyTypeObject *type, fdp_py_producer *producer);

/* Forgets every type (tests, and the module's own clearing). */
void fdp_py_producer_forget(fdp_py_state *state);

#endif

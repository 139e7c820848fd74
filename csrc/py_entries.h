/* What the dictionaries of a held tree's modules hold now: walked once for "_parameters" and once
 * for "_buffers", in the order of the modules. Used under the GIL. No streams. */
#ifndef FDP_PY_ENTRIES_H
#define FDP_PY_ENTRIES_H

#include "py_tree.h"

/* Walks one of the members of all modules into `list`. -1 with an exception. */
int fdp_entries_collect(fdp_tree *tree, int which, fdp_tree_entries *list);
/* New reference: bytes that are equal where the same entries hold the same tensors. */
PyObject *fdp_entries_pattern(const fdp_tree *tree);
/* New reference: a tuple of the indices of `count` entries from `*cursor` on, which moves. */
PyObject *fdp_entries_indices(const fdp_tree_entries *list, Py_ssize_t *cursor, Py_ssize_t count);

#endif

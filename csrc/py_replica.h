/* What the files of Replica share: py_replica.c (the type, and the walk over its modules),
 * py_attributes.c (the attribute dictionary of one module) and py_references.c (who holds them).
 * Used under the GIL, one call at a time per replica. No streams. */
#ifndef FDP_PY_REPLICA_H
#define FDP_PY_REPLICA_H

#include "py_tree.h"

/* One attribute: its name, what the base holds (NULL: nothing) and what the replica holds. */
typedef struct fdp_attribute {
  PyObject *key, *base, *own;
} fdp_attribute;

/* The attributes of one module as they were when base and replica last agreed, in the order of both
 * dictionaries, so that a walk over one of the two tells whether anything has changed.
 *
 * They are addresses, and own nothing. That is enough: while the replica holds an object no other
 * can have its address, so if base and replica both hold the address written here they hold one
 * object. Where the replica holds something else than the base, the types are compared too. */
typedef struct fdp_attributes {
  bool known; /* false: nothing written here counts */
  uint64_t base_version, own_version; /* of both dictionaries when they held this; 0: not known */
  Py_ssize_t count, base_count, capacity;
  Py_ssize_t parameters, buffers; /* places of "_parameters" and "_buffers" */
  int hook_count; /* dictionaries of hooks, all empty, each of one type in base and replica */
  PyObject *base_hooks[FDP_TREE_HOOK_NAMES], *own_hooks[FDP_TREE_HOOK_NAMES];
  fdp_attribute *list;
} fdp_attributes;

typedef struct fdp_replica {
  PyObject_HEAD
  fdp_tree *tree;
  PyObject *modules;      /* tuple of the replica's modules, in the tree's order */
  Py_ssize_t module_count;
  Py_ssize_t own_count;   /* FDP_MEMBER_COUNT dictionaries for each module */
  PyObject **own;
  fdp_attributes *attributes; /* per module */
  Py_ssize_t *references; /* per module: its reference count at settle() */
  Py_ssize_t *bound;      /* per module: methods of it that this refresh wrote */
} fdp_replica;

/* Borrowed: one of the own dictionaries of module `m`. */
PyObject *fdp_replica_own(const fdp_replica *replica, Py_ssize_t m, int which);

/* 1 if the replica still holds what it held when `attributes` was written. */
int fdp_attributes_untouched(fdp_attributes *attributes, PyObject *dict);
/* 1 if the base still holds what it held then. Only of use when the replica is untouched. */
int fdp_attributes_current(fdp_attributes *attributes, PyObject *base_dict);
/* Makes the attributes `dict` of replica module `m` as a new replica's. What is taken out of it
 * goes into the list `trash`. */
int fdp_attributes_sync(fdp_replica *replica, Py_ssize_t m, PyObject *base_dict, PyObject *dict,
                        PyObject *trash);

/* 1 if somebody else than the replica's own attributes holds a module who did not at settle(), 0 if
 * nobody does, -1 with an exception. */
int fdp_replica_is_held_outside(const fdp_replica *replica);

/* Writing dictionaries of a replica; -1 with an exception. A name of the base's dictionary and one
 * of the replica's are the same if they are equal. */
int fdp_replica_same_key(PyObject *a, PyObject *b);
/* Moves all values to `trash`. */
int fdp_replica_empty_dict(PyObject *dict, PyObject *trash);
/* dict[key] = value; `old`, or NULL, is what stands there, and goes to `trash`. */
int fdp_replica_set_item(PyObject *dict, PyObject *key, PyObject *old, PyObject *value,
                         PyObject *trash);

#endif

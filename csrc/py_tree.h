/* Tree: the modules below one base module, flattened once, and what must hold for them to be the
 * same tree still. Nothing here knows of torch: a module is an object whose __dict__ holds the
 * dictionaries "_parameters", "_buffers" and "_modules". Used under the GIL, one call at a time. No
 * streams. */
#ifndef FDP_PY_TREE_H
#define FDP_PY_TREE_H

#include "py_compat.h"
#include <stdbool.h>

/* A child of a module: its name and its place in the flattened tree, or -1 for None. */
typedef struct fdp_tree_child {
  PyObject *name;
  Py_ssize_t index;
} fdp_tree_child;

/* The dictionaries that tell what a module has below it. */
enum { FDP_MEMBER_PARAMETERS, FDP_MEMBER_BUFFERS, FDP_MEMBER_MODULES, FDP_MEMBER_COUNT };

typedef struct fdp_tree_module {
  PyObject *module;   /* the base module: an address only, unless the tree is held, or: */
  bool is_child;      /* of one before it, which keeps it alive. Else, but for the root, the tree
                         does: a class may have modules() of its own, and tell of others */
  PyTypeObject *type; /* its class when the tree was made: parametrize, lazy modules and assignments
                         to __class__ change it */
  Py_ssize_t first_child;
  Py_ssize_t child_count;
  uint64_t version; /* of its __dict__ when that held `members`; 0: not known */
  PyObject *members[FDP_MEMBER_COUNT]; /* addresses only; NULL: not looked for since */
  uint64_t children_version; /* of its "_modules" when that held these children; 0: not known */
} fdp_tree_module;

/* One entry of a "_parameters" or "_buffers" dictionary, in the order of the walk. */
typedef struct fdp_tree_entry {
  PyObject *tensor; /* borrowed from `tensors` below; NULL for None */
  Py_ssize_t index; /* in the collected tuple: one tensor under two names has one index */
} fdp_tree_entry;

typedef struct fdp_tree_entries {
  fdp_tree_entry *entries;
  Py_ssize_t count;
  Py_ssize_t capacity;
  PyObject *tensors; /* tuple of the distinct tensors, in order of first appearance; or NULL */
} fdp_tree_entries;

/* The dictionaries of hooks: a replica has its own copy of each, so that a hook that a forward adds
 * and removes never meets another replica's. */
enum { FDP_TREE_HOOK_NAMES = 11 };

typedef struct fdp_tree_names {
  PyObject *parameters, *buffers, *modules, *is_replica, *former_parameters, *copy;
  PyObject *compiled_call;
  PyObject *hooks[FDP_TREE_HOOK_NAMES];
} fdp_tree_names;

/* A tree owns no module that hangs below the root, so that a table of trees can be weak: between
 * calls it has their addresses only. hold() compares these with what hangs below the root now,
 * before anything is read through them, and owns all modules until release(). An address that
 * another module of the same class has taken over in the same place is no harm: a refresh reads all
 * else anew. */
typedef struct fdp_tree {
  PyObject_HEAD
  bool held;
  bool is_filled; /* false: not yet, or taken apart by the garbage collector */
  fdp_tree_module *modules;
  Py_ssize_t module_count;
  fdp_tree_child *children;
  Py_ssize_t child_count;
  PyObject *index_of; /* dict: id(base module) -> index, for methods bound to a base module */
  fdp_tree_entries parameters;
  fdp_tree_entries buffers;
  fdp_tree_names names;
} fdp_tree;

/* Adds the types Tree, Replica, Gate and AwaitedDict to the extension module. */
int fdp_py_tree_add(PyObject *module);
/* The spec of Replica (py_replica.c); its constructor takes (tree, modules). */
extern PyType_Spec fdp_replica_spec;

/* True if a key of an attribute dictionary is that name. Most keys are interned and are compared by
 * their address; those of an unpickled module are not. */
static inline PyObject *fdp_tree_member_name(const fdp_tree_names *names, int which)
{
  if (which == FDP_MEMBER_PARAMETERS) return names->parameters;
  return which == FDP_MEMBER_BUFFERS ? names->buffers : names->modules;
}

static inline bool fdp_tree_is_name(PyObject *key, PyObject *name)
{
  return key == name || (PyUnicode_Check(key) && !PyUnicode_CHECK_INTERNED(key) &&
                         PyUnicode_Compare(key, name) == 0);
}

/* True if nobody wrote to the dictionary since it had that version. Most modules of most models set
 * no attributes in a forward: to walk all of them was a sixth of a wrapper's time on the host. */
static inline bool fdp_tree_is_unwritten(PyObject *dict, uint64_t version)
{
  return version != 0 && fdp_py_dict_version(dict) == version;
}

/* New references; NULL with an exception when the object is no module. */
PyObject *fdp_tree_dict_of(PyObject *module);
PyObject *fdp_tree_member(PyObject *module, PyObject *name);
/* A new reference to one of the members of base module `m`, which somebody holds. */
PyObject *fdp_tree_member_of(fdp_tree *tree, Py_ssize_t m, int which);
/* The index of a base module in the tree, -1 when it is not in it (or, rarely, on error). */
Py_ssize_t fdp_tree_index_of(fdp_tree *tree, PyObject *module);

#endif

/* Who holds the modules of a replica: see py_replica.h. */
#include "py_replica.h"

static void count_reference(const fdp_replica *replica, PyObject *module, Py_ssize_t *counts)
{
  for (Py_ssize_t k = 0; k < replica->tree->module_count; k++)
    if (PyTuple_GET_ITEM(replica->modules, k) == module) counts[k]++;
}

/* How often the replica's own attributes name its own modules, directly or by a bound method, and
 * its "_modules" beyond the base's children: the forward may have added some (self.alias =
 * self.sub), and they are nobody else's. */
static int count_own_references(const fdp_replica *replica, Py_ssize_t *counts)
{
  PyObject *key, *value;
  for (Py_ssize_t m = 0; m < replica->tree->module_count; m++) {
    const fdp_tree_module *record = &replica->tree->modules[m];
    PyObject *dict = fdp_tree_dict_of(PyTuple_GET_ITEM(replica->modules, m));
    Py_ssize_t position = 0;
    if (dict == NULL) return -1;
    while (PyDict_Next(dict, &position, &key, &value))
      count_reference(replica, PyMethod_Check(value) ? PyMethod_GET_SELF(value) : value, counts);
    Py_DECREF(dict);
    position = 0;
    while (PyDict_Next(fdp_replica_own(replica, m, FDP_MEMBER_MODULES), &position, &key, &value))
      count_reference(replica, value, counts);
    for (Py_ssize_t c = 0; c < record->child_count; c++) {
      Py_ssize_t index = replica->tree->children[record->first_child + c].index;
      if (index >= 0) counts[index]--;
    }
  }
  return 0;
}

/* 1: somebody else holds a module; 0: nobody does; -1: error. */
int fdp_replica_is_held_outside(const fdp_replica *replica)
{
  Py_ssize_t count = replica->tree->module_count;
  Py_ssize_t *own = PyMem_Calloc((size_t)count + 1, sizeof(*own));
  if (own == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  int result = count_own_references(replica, own);
  for (Py_ssize_t m = 0; result == 0 && m < count; m++) {
    Py_ssize_t others = Py_REFCNT(PyTuple_GET_ITEM(replica->modules, m)) - own[m];
    if (others != replica->references[m] - replica->bound[m]) result = 1;
  }
  PyMem_Free(own);
  return result;
}

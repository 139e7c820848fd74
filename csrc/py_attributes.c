/* The attributes of one module of a replica, made as its base's: see py_replica.h. A sync walks the
 * dictionaries of both side by side and writes what differs; then it notes what both hold, so that
 * the next walks can do with one dictionary each, and write nothing. A dictionary that nobody wrote
 * to since is not walked at all.
 *
 * Whatever is taken out of a dictionary is put into a list that is dropped at the very end:
 * dropping a tensor can run any code, and no dictionary is being walked then. */
#include "py_replica.h"

PyObject *fdp_replica_own(const fdp_replica *replica, Py_ssize_t m, int which)
{
  return replica->own[m * FDP_MEMBER_COUNT + which];
}

int fdp_replica_same_key(PyObject *a, PyObject *b)
{
  return a == b || (PyUnicode_Check(a) && PyUnicode_Check(b) && PyUnicode_Compare(a, b) == 0);
}

int fdp_replica_empty_dict(PyObject *dict, PyObject *trash)
{
  PyObject *values = PyDict_Values(dict);
  int result = values == NULL ? -1 : PyList_Append(trash, values);
  Py_XDECREF(values);
  if (result == 0) PyDict_Clear(dict);
  return result;
}

int fdp_replica_set_item(PyObject *dict, PyObject *key, PyObject *old, PyObject *value,
                         PyObject *trash)
{
  if (old == value) return 0;
  if (old != NULL && old != Py_None && PyList_Append(trash, old) < 0) return -1;
  return PyDict_SetItem(dict, key, value);
}

static int is_hook_name(const fdp_tree_names *names, PyObject *key)
{
  for (int i = 0; i < FDP_TREE_HOOK_NAMES; i++)
    if (fdp_tree_is_name(key, names->hooks[i])) return 1;
  return 0;
}

/* A method bound to a base module, bound to the replica's module instead; else the value itself. */
static PyObject *rebound_method(fdp_replica *replica, PyObject *method, PyObject *current)
{
  Py_ssize_t index = fdp_tree_index_of(replica->tree, PyMethod_GET_SELF(method));
  if (index < 0) return PyErr_Occurred() ? NULL : Py_NewRef(method);
  PyObject *self = PyTuple_GET_ITEM(replica->modules, index);
  replica->bound[index]++;
  PyObject *function = PyMethod_GET_FUNCTION(method);
  if (current != NULL && PyMethod_Check(current) && PyMethod_GET_SELF(current) == self &&
      PyMethod_GET_FUNCTION(current) == function)
    return Py_NewRef(current);
  return PyMethod_New(function, self);
}

/* A new reference to what replica module `m` holds under `key` where its base holds `value`;
 * `current` is what it holds now, or NULL. */
static PyObject *wanted_value(fdp_replica *replica, Py_ssize_t m, PyObject *key, PyObject *value,
                              PyObject *current)
{
  const fdp_tree_names *names = &replica->tree->names;
  if (fdp_tree_is_name(key, names->parameters) ||
      fdp_tree_is_name(key, names->former_parameters))
    return Py_NewRef(fdp_replica_own(replica, m, FDP_MEMBER_PARAMETERS));
  if (fdp_tree_is_name(key, names->buffers))
    return Py_NewRef(fdp_replica_own(replica, m, FDP_MEMBER_BUFFERS));
  if (fdp_tree_is_name(key, names->modules))
    return Py_NewRef(fdp_replica_own(replica, m, FDP_MEMBER_MODULES));
  if (fdp_tree_is_name(key, names->is_replica)) return Py_NewRef(Py_True);
  /* module.compile() binds it to the base: a replica runs uncompiled. */
  if (fdp_tree_is_name(key, names->compiled_call)) return Py_NewRef(Py_None);
  if (PyMethod_Check(value)) return rebound_method(replica, value, current);
  if (PyDict_Check(value) && is_hook_name(names, key)) {
    if (current != NULL && current != value && Py_TYPE(current) == Py_TYPE(value) &&
        PyDict_GET_SIZE(current) == 0 && PyDict_GET_SIZE(value) == 0)
      return Py_NewRef(current);
    return PyObject_CallMethodNoArgs(value, names->copy);
  }
  return Py_NewRef(value);
}

/* The two entries that a replica has and its base has not, unless the base is a replica itself. */
static PyObject *added_key(const fdp_replica *replica, PyObject *base_dict, int which)
{
  const fdp_tree_names *names = &replica->tree->names;
  PyObject *key = which == 0 ? names->is_replica : names->former_parameters;
  int present = PyDict_Contains(base_dict, key);
  return present == 0 ? key : NULL;
}

static int write_attribute(fdp_replica *replica, Py_ssize_t m, PyObject *dict, PyObject *key,
                           PyObject *value, PyObject *current, PyObject *trash)
{
  /* Copying a hook dictionary of a subclass can run any code. */
  Py_INCREF(key);
  Py_INCREF(value);
  Py_XINCREF(current);
  PyObject *wanted = wanted_value(replica, m, key, value, current);
  int result = wanted == NULL ? -1 : fdp_replica_set_item(dict, key, current, wanted, trash);
  Py_XDECREF(wanted);
  Py_XDECREF(current);
  Py_DECREF(value);
  Py_DECREF(key);
  return result;
}

/* Writes the replica's attributes from nothing, in the base's order. */
static int rebuild_attributes(fdp_replica *replica, Py_ssize_t m, PyObject *base_dict,
                              PyObject *dict, PyObject *trash)
{
  PyObject *key, *value;
  Py_ssize_t position = 0;
  if (fdp_replica_empty_dict(dict, trash) < 0) return -1;
  while (PyDict_Next(base_dict, &position, &key, &value))
    if (write_attribute(replica, m, dict, key, value, NULL, trash) < 0) return -1;
  for (int which = 0; which < 2; which++) {
    key = added_key(replica, base_dict, which);
    if (key != NULL && write_attribute(replica, m, dict, key, Py_None, NULL, trash) < 0) return -1;
  }
  return PyErr_Occurred() ? -1 : 0;
}

/* 1: the attributes of module `m` are as a new replica's; 0: their keys differ; -1: error. */
static int sync_attributes(fdp_replica *replica, Py_ssize_t m, PyObject *base_dict, PyObject *dict,
                           PyObject *trash)
{
  PyObject *key, *value, *own_key, *current;
  Py_ssize_t position = 0, own_position = 0;
  while (PyDict_Next(base_dict, &position, &key, &value)) {
    if (!PyDict_Next(dict, &own_position, &own_key, &current) ||
        !fdp_replica_same_key(key, own_key))
      return 0;
    if (current == value && !PyMethod_Check(value) && !PyDict_Check(value) &&
        !fdp_tree_is_name(key, replica->tree->names.compiled_call))
      continue;
    if (write_attribute(replica, m, dict, key, value, current, trash) < 0) return -1;
  }
  for (int which = 0; which < 2; which++) {
    key = added_key(replica, base_dict, which);
    if (key == NULL) continue;
    if (!PyDict_Next(dict, &own_position, &own_key, &current) ||
        !fdp_replica_same_key(key, own_key))
      return 0;
    if (write_attribute(replica, m, dict, key, Py_None, current, trash) < 0) return -1;
  }
  return !PyDict_Next(dict, &own_position, &own_key, &current);
}

static bool is_empty_dict_of_type(PyObject *object, PyTypeObject *type)
{
  return Py_TYPE(object) == type && PyDict_Check(object) && PyDict_GET_SIZE(object) == 0;
}

/* Notes one attribute that both hold. False if it has to be looked at anew each time: a bound
 * method, or hooks. */
static bool note_shared(const fdp_tree_names *names, fdp_attributes *attributes, PyObject *key,
                        PyObject *base, PyObject *own)
{
  Py_ssize_t place = attributes->count;
  if (PyMethod_Check(base)) return false;
  if (fdp_tree_is_name(key, names->parameters)) attributes->parameters = place;
  if (fdp_tree_is_name(key, names->buffers)) attributes->buffers = place;
  if (base == own || !is_hook_name(names, key)) return true;
  if (attributes->hook_count == FDP_TREE_HOOK_NAMES ||
      !is_empty_dict_of_type(base, Py_TYPE(base)) || !is_empty_dict_of_type(own, Py_TYPE(base)))
    return false;
  attributes->base_hooks[attributes->hook_count] = base;
  attributes->own_hooks[attributes->hook_count++] = own;
  return true;
}

/* Notes what base and replica hold, now that they agree. */
static void note(const fdp_tree_names *names, fdp_attributes *attributes, PyObject *base_dict,
                 PyObject *dict)
{
  PyObject *key, *base, *own_key, *own;
  Py_ssize_t position = 0, own_position = 0, size = PyDict_GET_SIZE(dict);
  attributes->count = 0;
  attributes->hook_count = 0;
  attributes->parameters = attributes->buffers = -1;
  attributes->base_count = PyDict_GET_SIZE(base_dict);
  if (size > attributes->capacity) {
    fdp_attribute *grown = PyMem_Realloc(attributes->list, (size_t)size * sizeof(*grown));
    if (grown == NULL) return; /* nothing is known then, which is slower and right */
    attributes->list = grown;
    attributes->capacity = size;
  }
  while (PyDict_Next(dict, &own_position, &own_key, &own)) {
    if (!PyDict_Next(base_dict, &position, &key, &base)) {
      key = own_key; /* one of the two that a replica has and its base has not */
      base = NULL;
    }
    if (key != own_key || (base != NULL && !note_shared(names, attributes, key, base, own))) return;
    attributes->list[attributes->count++] = (fdp_attribute){key, base, own};
  }
  attributes->known = attributes->parameters >= 0 && attributes->buffers >= 0;
  attributes->base_version = fdp_py_dict_version(base_dict);
  attributes->own_version = fdp_py_dict_version(dict);
}

int fdp_attributes_sync(fdp_replica *replica, Py_ssize_t m, PyObject *base_dict, PyObject *dict,
                        PyObject *trash)
{
  fdp_attributes *attributes = &replica->attributes[m];
  attributes->known = false;
  int result = sync_attributes(replica, m, base_dict, dict, trash);
  if (result == 0) result = rebuild_attributes(replica, m, base_dict, dict, trash);
  if (result < 0) return -1;
  note(&replica->tree->names, attributes, base_dict, dict);
  return 0;
}

static bool holds_base(const fdp_attributes *attributes, PyObject *base_dict)
{
  const fdp_attribute *expected = attributes->list;
  PyObject *key, *value;
  Py_ssize_t position = 0;
  if (PyDict_GET_SIZE(base_dict) != attributes->base_count) return false;
  for (; PyDict_Next(base_dict, &position, &key, &value); expected++)
    if (key != expected->key || value != expected->base) return false;
  return true;
}

static bool holds_own(const fdp_attributes *attributes, PyObject *dict)
{
  const fdp_attribute *expected = attributes->list;
  PyObject *key, *value;
  Py_ssize_t position = 0;
  if (PyDict_GET_SIZE(dict) != attributes->count) return false;
  for (; PyDict_Next(dict, &position, &key, &value); expected++)
    if (key != expected->key || value != expected->own) return false;
  return true;
}

int fdp_attributes_current(fdp_attributes *attributes, PyObject *base_dict)
{
  if (!attributes->known) return 0;
  if (!fdp_tree_is_unwritten(base_dict, attributes->base_version)) {
    if (!holds_base(attributes, base_dict)) return 0;
    attributes->base_version = fdp_py_dict_version(base_dict);
  }
  for (int i = 0; i < attributes->hook_count; i++) {
    PyObject *hooks = attributes->base_hooks[i];
    if (Py_TYPE(hooks) != Py_TYPE(attributes->own_hooks[i]) || PyDict_GET_SIZE(hooks) > 0) return 0;
  }
  return 1;
}

int fdp_attributes_untouched(fdp_attributes *attributes, PyObject *dict)
{
  if (!attributes->known) return 0;
  if (!fdp_tree_is_unwritten(dict, attributes->own_version)) {
    if (!holds_own(attributes, dict)) return 0;
    attributes->own_version = fdp_py_dict_version(dict);
  }
  for (int i = 0; i < attributes->hook_count; i++)
    if (PyDict_GET_SIZE(attributes->own_hooks[i]) > 0) return 0;
  return 1;
}

/* Replica: one replica of a Tree, refreshed for every forward by one call. A refresh walks the
 * dictionaries of base and replica side by side and writes what differs, so that an edit of the
 * base is seen and an edit that the replica's last forward made is dropped, as if the replica had
 * just been made. Used under the GIL, one call at a time per replica. No streams.
 *
 * Whatever is taken out of a dictionary is put into a list that is dropped at the very end:
 * dropping a tensor can run any code, and no dictionary is being walked then. */
#include "py_tree.h"

enum { OWN_PARAMETERS, OWN_BUFFERS, OWN_MODULES, OWN_COUNT };

typedef struct fdp_replica {
  PyObject_HEAD
  fdp_tree *tree;
  PyObject *modules;      /* tuple of the replica's modules, in the tree's order */
  Py_ssize_t own_count;   /* OWN_COUNT dictionaries of its own for each module */
  PyObject **own;
  Py_ssize_t *references; /* per module: its reference count at settle() */
} fdp_replica;

static PyObject *own_dict(const fdp_replica *replica, Py_ssize_t m, int which)
{
  return replica->own[m * OWN_COUNT + which];
}

static int same_key(PyObject *a, PyObject *b)
{
  return a == b || (PyUnicode_Check(a) && PyUnicode_Check(b) && PyUnicode_Compare(a, b) == 0);
}

/* Moves all values of a dictionary to `trash` and leaves it empty. */
static int empty_dict(PyObject *dict, PyObject *trash)
{
  PyObject *values = PyDict_Values(dict);
  int result = values == NULL ? -1 : PyList_Append(trash, values);
  Py_XDECREF(values);
  if (result == 0) PyDict_Clear(dict);
  return result;
}

static int set_item(PyObject *dict, PyObject *key, PyObject *old, PyObject *value, PyObject *trash)
{
  if (old == value) return 0;
  if (old != NULL && old != Py_None && PyList_Append(trash, old) < 0) return -1;
  return PyDict_SetItem(dict, key, value);
}

static int is_hook_name(const fdp_tree_names *names, PyObject *key)
{
  for (int i = 0; i < FDP_TREE_HOOK_NAMES; i++)
    if (key == names->hooks[i]) return 1;
  return 0;
}

/* A method bound to a base module, bound to the replica's module instead; else the value itself. */
static PyObject *rebound_method(fdp_replica *replica, PyObject *method, PyObject *current)
{
  Py_ssize_t index = fdp_tree_index_of(replica->tree, PyMethod_GET_SELF(method));
  if (index < 0) return PyErr_Occurred() ? NULL : Py_NewRef(method);
  PyObject *self = PyTuple_GET_ITEM(replica->modules, index);
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
  if (key == names->parameters || key == names->former_parameters)
    return Py_NewRef(own_dict(replica, m, OWN_PARAMETERS));
  if (key == names->buffers) return Py_NewRef(own_dict(replica, m, OWN_BUFFERS));
  if (key == names->modules) return Py_NewRef(own_dict(replica, m, OWN_MODULES));
  if (key == names->is_replica) return Py_NewRef(Py_True);
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
  PyObject *wanted = wanted_value(replica, m, key, value, current);
  int result = wanted == NULL ? -1 : set_item(dict, key, current, wanted, trash);
  Py_XDECREF(wanted);
  return result;
}

/* Writes the replica's attributes from nothing, in the base's order. */
static int rebuild_attributes(fdp_replica *replica, Py_ssize_t m, PyObject *base_dict,
                              PyObject *dict, PyObject *trash)
{
  PyObject *key, *value;
  Py_ssize_t position = 0;
  if (empty_dict(dict, trash) < 0) return -1;
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
    if (!PyDict_Next(dict, &own_position, &own_key, &current) || !same_key(key, own_key)) return 0;
    if (current == value && !PyMethod_Check(value) && !PyDict_Check(value)) continue;
    if (write_attribute(replica, m, dict, key, value, current, trash) < 0) return -1;
  }
  for (int which = 0; which < 2; which++) {
    key = added_key(replica, base_dict, which);
    if (key == NULL) continue;
    if (!PyDict_Next(dict, &own_position, &own_key, &current) || own_key != key) return 0;
    if (write_attribute(replica, m, dict, key, Py_None, current, trash) < 0) return -1;
  }
  return !PyDict_Next(dict, &own_position, &own_key, &current);
}

/* The replica's "_modules": the base's names, the replica's own modules. */
static int sync_children(fdp_replica *replica, Py_ssize_t m, PyObject *trash)
{
  const fdp_tree_module *record = &replica->tree->modules[m];
  const fdp_tree_child *children = &replica->tree->children[record->first_child];
  PyObject *dict = own_dict(replica, m, OWN_MODULES), *key, *current;
  Py_ssize_t position = 0, seen = 0;
  while (PyDict_Next(dict, &position, &key, &current)) {
    if (seen == record->child_count || !same_key(key, children[seen].name)) break;
    PyObject *child = children[seen].index < 0
                          ? Py_None
                          : PyTuple_GET_ITEM(replica->modules, children[seen].index);
    if (current != child) break;
    seen++;
  }
  if (seen == record->child_count && PyDict_GET_SIZE(dict) == seen) return 0;
  if (empty_dict(dict, trash) < 0) return -1;
  for (Py_ssize_t c = 0; c < record->child_count; c++) {
    PyObject *child = children[c].index < 0
                          ? Py_None
                          : PyTuple_GET_ITEM(replica->modules, children[c].index);
    if (PyDict_SetItem(dict, children[c].name, child) < 0) return -1;
  }
  return 0;
}

/* 1 if both dictionaries have the same keys in the same order. */
static int same_keys(PyObject *a, PyObject *b)
{
  PyObject *key_a, *key_b, *value;
  Py_ssize_t position_a = 0, position_b = 0;
  if (PyDict_GET_SIZE(a) != PyDict_GET_SIZE(b)) return 0;
  while (PyDict_Next(a, &position_a, &key_a, &value))
    if (!PyDict_Next(b, &position_b, &key_b, &value) || !same_key(key_a, key_b)) return 0;
  return 1;
}

/* Points the entries of one dictionary at this step's copies. `cursor` walks the collected list. */
static int write_entries(const fdp_tree_entries *collected, Py_ssize_t *cursor, PyObject *base_dict,
                         PyObject *own, PyObject *copies, PyObject *trash)
{
  PyObject *key, *value;
  Py_ssize_t position = 0;
  if (!same_keys(base_dict, own) && empty_dict(own, trash) < 0) return -1;
  while (PyDict_Next(base_dict, &position, &key, &value)) {
    const fdp_tree_entry *entry = &collected->entries[*cursor];
    if (*cursor >= collected->count || entry->tensor != (value == Py_None ? NULL : value)) {
      PyErr_SetString(PyExc_RuntimeError,
                      "the module's parameters or buffers were replaced by another thread while "
                      "its replicas were being made");
      return -1;
    }
    PyObject *copy = entry->index < 0 ? Py_None : PyTuple_GET_ITEM(copies, entry->index);
    PyObject *current = PyDict_GetItemWithError(own, key);
    if (set_item(own, key, current, copy, trash) < 0) return -1;
    ++*cursor;
  }
  return 0;
}

/* Sets every entry to None: the copies go, the names stay. */
static int drop_entries(PyObject *own, PyObject *trash)
{
  PyObject *key, *value;
  Py_ssize_t position = 0;
  while (PyDict_Next(own, &position, &key, &value))
    if (set_item(own, key, value, Py_None, trash) < 0) return -1;
  return 0;
}

/* Attributes and children of module `m` as a new replica's. */
static int sync_module(fdp_replica *replica, Py_ssize_t m, PyObject *base_dict, PyObject *trash)
{
  PyObject *dict = fdp_tree_dict_of(PyTuple_GET_ITEM(replica->modules, m));
  int result = dict == NULL ? -1 : sync_attributes(replica, m, base_dict, dict, trash);
  if (result == 0) result = rebuild_attributes(replica, m, base_dict, dict, trash);
  if (result >= 0) result = sync_children(replica, m, trash);
  Py_XDECREF(dict);
  return result < 0 ? -1 : 0;
}

static PyObject *base_member(PyObject *base_dict, PyObject *name)
{
  PyObject *member = PyDict_GetItemWithError(base_dict, name);
  if (member != NULL && PyDict_Check(member)) return member;
  if (!PyErr_Occurred()) PyErr_Format(PyExc_TypeError, "module has no dictionary %R", name);
  return NULL;
}

static int refresh_modules(fdp_replica *replica, PyObject *parameters, PyObject *buffers,
                           PyObject *trash)
{
  fdp_tree *tree = replica->tree;
  Py_ssize_t parameter_cursor = 0, buffer_cursor = 0;
  for (Py_ssize_t m = 0; m < tree->module_count; m++) {
    PyObject *base_dict = fdp_tree_dict_of(tree->modules[m].module), *member;
    int result = base_dict == NULL ? -1 : sync_module(replica, m, base_dict, trash);
    if (result == 0) {
      member = base_member(base_dict, tree->names.parameters);
      result = member == NULL ? -1
                              : write_entries(&tree->parameters, &parameter_cursor, member,
                                              own_dict(replica, m, OWN_PARAMETERS), parameters,
                                              trash);
    }
    if (result == 0) {
      member = base_member(base_dict, tree->names.buffers);
      result = member == NULL ? -1
                              : write_entries(&tree->buffers, &buffer_cursor, member,
                                              own_dict(replica, m, OWN_BUFFERS), buffers, trash);
    }
    Py_XDECREF(base_dict);
    if (result < 0) return -1;
  }
  return 0;
}

static int check_copies(PyObject *copies, const fdp_tree_entries *collected, const char *name)
{
  Py_ssize_t expected = collected->tensors == NULL ? -1 : PyTuple_GET_SIZE(collected->tensors);
  if (PyTuple_Check(copies) && PyTuple_GET_SIZE(copies) == expected) return 0;
  PyErr_Format(PyExc_ValueError, "%s: expected a tuple of the %zd tensors that collect() found",
               name, expected);
  return -1;
}

static int check_held(const fdp_tree *tree)
{
  if (tree->held) return 0;
  PyErr_SetString(PyExc_RuntimeError, "the replica's tree is not held");
  return -1;
}

static PyObject *replica_refresh(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
  fdp_replica *replica = (fdp_replica *)self;
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "refresh takes (parameters, buffers)");
    return NULL;
  }
  if (check_held(replica->tree) < 0) return NULL;
  if (check_copies(arguments[0], &replica->tree->parameters, "parameters") < 0 ||
      check_copies(arguments[1], &replica->tree->buffers, "buffers") < 0)
    return NULL;
  PyObject *trash = PyList_New(0);
  int result = trash == NULL ? -1
                             : refresh_modules(replica, arguments[0], arguments[1], trash);
  Py_XDECREF(trash);
  if (result < 0) return NULL;
  Py_RETURN_NONE;
}

static PyObject *replica_empty(PyObject *self, PyObject *Py_UNUSED(ignored))
{
  fdp_replica *replica = (fdp_replica *)self;
  fdp_tree *tree = replica->tree;
  if (check_held(tree) < 0) return NULL;
  PyObject *trash = PyList_New(0);
  int result = trash == NULL ? -1 : 0;
  for (Py_ssize_t m = 0; result == 0 && m < tree->module_count; m++) {
    PyObject *base_dict = fdp_tree_dict_of(tree->modules[m].module);
    if (base_dict == NULL || sync_module(replica, m, base_dict, trash) < 0 ||
        drop_entries(own_dict(replica, m, OWN_PARAMETERS), trash) < 0 ||
        drop_entries(own_dict(replica, m, OWN_BUFFERS), trash) < 0)
      result = -1;
    Py_XDECREF(base_dict);
  }
  Py_XDECREF(trash);
  if (result < 0) return NULL;
  Py_RETURN_NONE;
}

static PyObject *replica_settle(PyObject *self, PyObject *Py_UNUSED(ignored))
{
  fdp_replica *replica = (fdp_replica *)self;
  for (Py_ssize_t m = 0; m < replica->tree->module_count; m++)
    replica->references[m] = Py_REFCNT(PyTuple_GET_ITEM(replica->modules, m));
  Py_RETURN_NONE;
}

static PyObject *replica_idle(PyObject *self, PyObject *Py_UNUSED(ignored))
{
  fdp_replica *replica = (fdp_replica *)self;
  for (Py_ssize_t m = 0; m < replica->tree->module_count; m++)
    if (Py_REFCNT(PyTuple_GET_ITEM(replica->modules, m)) != replica->references[m]) Py_RETURN_FALSE;
  Py_RETURN_TRUE;
}

static int replica_fill(fdp_replica *replica, fdp_tree *tree, PyObject *modules)
{
  const fdp_tree_names *names = &tree->names;
  PyObject *const members[OWN_COUNT] = {names->parameters, names->buffers, names->modules};
  Py_ssize_t count = tree->module_count;
  replica->tree = (fdp_tree *)Py_NewRef((PyObject *)tree);
  replica->modules = Py_NewRef(modules);
  replica->own = PyMem_Calloc((size_t)(count * OWN_COUNT + 1), sizeof(PyObject *));
  replica->references = PyMem_Calloc((size_t)count + 1, sizeof(Py_ssize_t));
  if (replica->own == NULL || replica->references == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  for (Py_ssize_t m = 0; m < count; m++) {
    PyObject *module = PyTuple_GET_ITEM(modules, m);
    if (Py_TYPE(module) != tree->modules[m].type || module == tree->modules[m].module) {
      PyErr_Format(PyExc_TypeError, "modules[%zd] must be another object of type %s", m,
                   tree->modules[m].type->tp_name);
      return -1;
    }
    for (int which = 0; which < OWN_COUNT; which++) {
      PyObject *own = fdp_tree_member(module, members[which]);
      if (own == NULL) return -1;
      replica->own[m * OWN_COUNT + which] = own;
      replica->own_count++;
    }
  }
  return 0;
}

static PyObject *replica_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
  PyObject *tree_type = PyObject_GetAttrString(PyType_GetModule(type), "Tree");
  fdp_replica *replica = NULL;
  if (tree_type == NULL) return NULL;
  PyObject *tree = PyTuple_GET_SIZE(arguments) == 2 ? PyTuple_GET_ITEM(arguments, 0) : NULL;
  PyObject *modules = tree != NULL ? PyTuple_GET_ITEM(arguments, 1) : NULL;
  if (tree == NULL || (PyObject *)Py_TYPE(tree) != tree_type || !PyTuple_Check(modules) ||
      PyTuple_GET_SIZE(modules) != ((fdp_tree *)tree)->module_count || keywords != NULL) {
    PyErr_SetString(PyExc_TypeError,
                    "Replica takes a Tree and a tuple with one module for each of the tree's");
  } else {
    replica = (fdp_replica *)type->tp_alloc(type, 0);
    if (replica != NULL && replica_fill(replica, (fdp_tree *)tree, modules) < 0)
      Py_CLEAR(replica);
  }
  Py_DECREF(tree_type);
  return (PyObject *)replica;
}

static int replica_traverse(PyObject *self, visitproc visit, void *arg)
{
  fdp_replica *replica = (fdp_replica *)self;
  Py_VISIT(Py_TYPE(self));
  for (Py_ssize_t i = 0; i < replica->own_count; i++) Py_VISIT(replica->own[i]);
  Py_VISIT(replica->modules);
  Py_VISIT(replica->tree);
  return 0;
}

static int replica_clear(PyObject *self)
{
  fdp_replica *replica = (fdp_replica *)self;
  Py_ssize_t own_count = replica->own_count;
  replica->own_count = 0;
  for (Py_ssize_t i = 0; i < own_count; i++) Py_CLEAR(replica->own[i]);
  Py_CLEAR(replica->modules);
  Py_CLEAR(replica->tree);
  return 0;
}

static void replica_dealloc(PyObject *self)
{
  PyTypeObject *type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  replica_clear(self);
  PyMem_Free(((fdp_replica *)self)->own);
  PyMem_Free(((fdp_replica *)self)->references);
  type->tp_free(self);
  Py_DECREF(type);
}

static PyObject *replica_modules(PyObject *self, void *Py_UNUSED(closure))
{
  return Py_NewRef(((fdp_replica *)self)->modules);
}

static PyMethodDef replica_methods[] = {
    {"refresh", (PyCFunction)(void (*)(void))replica_refresh, METH_FASTCALL,
     "refresh(parameters, buffers): makes every module as a new replica's, with these copies of "
     "the tensors that Tree.collect() found, in its order."},
    {"empty", replica_empty, METH_NOARGS,
     "empty(): drops the copies and whatever the forward left in the modules."},
    {"settle", replica_settle, METH_NOARGS,
     "settle(): whoever holds a module of this replica now is no user of it."},
    {"idle", replica_idle, METH_NOARGS,
     "idle() -> bool: nobody holds a module of this replica who did not at settle()."},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef replica_members[] = {
    {"modules", replica_modules, NULL, "The replica's modules, in the tree's order.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot replica_slots[] = {
    {Py_tp_doc, "Replica(tree, modules): new modules of the same types as the tree's."},
    {Py_tp_new, replica_new},
    {Py_tp_dealloc, replica_dealloc},
    {Py_tp_traverse, replica_traverse},
    {Py_tp_clear, replica_clear},
    {Py_tp_methods, replica_methods},
    {Py_tp_getset, replica_members},
    {0, NULL}};

PyType_Spec fdp_replica_spec = {.name = "fastdp._C.Replica",
                                .basicsize = sizeof(fdp_replica),
                                .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC |
                                         Py_TPFLAGS_IMMUTABLETYPE,
                                .slots = replica_slots};

/* Replica: one replica of a Tree, refreshed for every forward by one call. A refresh walks the
 * dictionaries that somebody wrote to, base and replica side by side, and writes what differs, so
 * that an edit of the base is seen and an edit that the replica's last forward made is dropped, as
 * if the replica had just been made. Used under the GIL, one call at a time per replica. No
 * streams.
 *
 * Whatever is taken out of a dictionary is put into a list that is dropped at the very end:
 * dropping a tensor can run any code, and no dictionary is being walked then. */
#include "py_replica.h"

#include <string.h>

/* The replica's "_modules": the base's names, the replica's own modules. */
static int sync_children(fdp_replica *replica, Py_ssize_t m, PyObject *trash)
{
  const fdp_tree_module *record = &replica->tree->modules[m];
  const fdp_tree_child *children = &replica->tree->children[record->first_child];
  PyObject *dict = fdp_replica_own(replica, m, FDP_MEMBER_MODULES), *key, *current;
  Py_ssize_t position = 0, seen = 0;
  if (record->child_count == 0 && PyDict_GET_SIZE(dict) == 0) return 0; /* as most are */
  while (PyDict_Next(dict, &position, &key, &current)) {
    if (seen == record->child_count || !fdp_replica_same_key(key, children[seen].name)) break;
    PyObject *child = children[seen].index < 0
                          ? Py_None
                          : PyTuple_GET_ITEM(replica->modules, children[seen].index);
    if (current != child) break;
    seen++;
  }
  if (seen == record->child_count && PyDict_GET_SIZE(dict) == seen) return 0;
  if (fdp_replica_empty_dict(dict, trash) < 0) return -1;
  for (Py_ssize_t c = 0; c < record->child_count; c++) {
    PyObject *child = children[c].index < 0
                          ? Py_None
                          : PyTuple_GET_ITEM(replica->modules, children[c].index);
    if (PyDict_SetItem(dict, children[c].name, child) < 0) return -1;
  }
  return 0;
}

/* 1: entries of one dictionary point at this step's copies; 0: its names are not the base's; -1:
 * error. `*cursor` walks the collected list. */
static int write_entries(const fdp_tree_entries *collected, Py_ssize_t *cursor,
                         PyObject *base_dict, PyObject *own, PyObject *copies, PyObject *trash)
{
  PyObject *key, *value, *own_key, *current;
  Py_ssize_t position = 0, own_position = 0;
  while (PyDict_Next(base_dict, &position, &key, &value)) {
    const fdp_tree_entry *entry = &collected->entries[*cursor];
    if (*cursor >= collected->count || entry->tensor != (value == Py_None ? NULL : value)) {
      PyErr_SetString(PyExc_RuntimeError,
                      "the module's parameters or buffers were replaced by another thread while "
                      "its replicas were being made");
      return -1;
    }
    if (!PyDict_Next(own, &own_position, &own_key, &current) ||
        !fdp_replica_same_key(key, own_key))
      return 0;
    PyObject *copy = entry->index < 0 ? Py_None : PyTuple_GET_ITEM(copies, entry->index);
    if (fdp_replica_set_item(own, own_key, current, copy, trash) < 0) return -1;
    ++*cursor;
  }
  return !PyDict_Next(own, &own_position, &own_key, &current);
}

/* The base's names, in its order, in an own dictionary. */
static int rebuild_entries(PyObject *base_dict, PyObject *own, PyObject *trash)
{
  PyObject *key, *value;
  Py_ssize_t position = 0;
  if (fdp_replica_empty_dict(own, trash) < 0) return -1;
  while (PyDict_Next(base_dict, &position, &key, &value))
    if (PyDict_SetItem(own, key, Py_None) < 0) return -1;
  return 0;
}

/* Sets every entry to None: the copies go, the names stay. */
static int drop_entries(PyObject *own, PyObject *trash)
{
  PyObject *key, *value;
  Py_ssize_t position = 0;
  while (PyDict_Next(own, &position, &key, &value))
    if (fdp_replica_set_item(own, key, value, Py_None, trash) < 0) return -1;
  return 0;
}

/* Attributes and children of module `m` as a new replica's, if they are not. */
static int sync_module(fdp_replica *replica, Py_ssize_t m, PyObject *base_dict, PyObject *trash)
{
  PyObject *dict = fdp_tree_dict_of(PyTuple_GET_ITEM(replica->modules, m));
  int result = dict == NULL ? -1 : 0;
  if (result == 0 && !(fdp_attributes_untouched(&replica->attributes[m], dict) &&
                       fdp_attributes_current(&replica->attributes[m], base_dict)))
    result = fdp_attributes_sync(replica, m, base_dict, dict, trash);
  if (result == 0) result = sync_children(replica, m, trash);
  Py_XDECREF(dict);
  return result;
}

/* Borrowed: the base's "_parameters" or "_buffers", at its place if that is known. */
static PyObject *base_member(const fdp_attributes *attributes, Py_ssize_t place,
                             PyObject *base_dict, PyObject *name)
{
  PyObject *member = attributes->known ? attributes->list[place].base
                                       : PyDict_GetItemWithError(base_dict, name);
  if (member != NULL && PyDict_Check(member)) return member;
  if (!PyErr_Occurred()) PyErr_Format(PyExc_TypeError, "module has no dictionary %R", name);
  return NULL;
}

static int refresh_entries(const fdp_tree_entries *collected, Py_ssize_t *cursor,
                           PyObject *base_dict, PyObject *own, PyObject *copies, PyObject *trash)
{
  Py_ssize_t start = *cursor;
  if (base_dict == NULL) return -1;
  if (PyDict_GET_SIZE(base_dict) == 0 && PyDict_GET_SIZE(own) == 0) return 0; /* as most are */
  int result = write_entries(collected, cursor, base_dict, own, copies, trash);
  if (result != 0) return result < 0 ? -1 : 0;
  *cursor = start;
  if (rebuild_entries(base_dict, own, trash) < 0) return -1;
  return write_entries(collected, cursor, base_dict, own, copies, trash) < 0 ? -1 : 0;
}

static int refresh_modules(fdp_replica *replica, PyObject *parameters, PyObject *buffers,
                           PyObject *trash)
{
  fdp_tree *tree = replica->tree;
  Py_ssize_t parameter_cursor = 0, buffer_cursor = 0;
  memset(replica->bound, 0, (size_t)tree->module_count * sizeof(*replica->bound));
  for (Py_ssize_t m = 0; m < tree->module_count; m++) {
    const fdp_attributes *attributes = &replica->attributes[m];
    PyObject *base_dict = fdp_tree_dict_of(tree->modules[m].module);
    /* Also after empty(): somebody may hold a module's __dict__, or a weak reference to it. */
    int result = base_dict == NULL ? -1 : sync_module(replica, m, base_dict, trash);
    if (result == 0)
      result = refresh_entries(
          &tree->parameters, &parameter_cursor,
          base_member(attributes, attributes->parameters, base_dict, tree->names.parameters),
          fdp_replica_own(replica, m, FDP_MEMBER_PARAMETERS), parameters, trash);
    if (result == 0)
      result = refresh_entries(
          &tree->buffers, &buffer_cursor,
          base_member(attributes, attributes->buffers, base_dict, tree->names.buffers),
          fdp_replica_own(replica, m, FDP_MEMBER_BUFFERS), buffers, trash);
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

/* The garbage collector may have taken it apart while something still held it. */
static int check_whole(const fdp_replica *replica)
{
  if (replica->tree != NULL && replica->modules != NULL) return 0;
  PyErr_SetString(PyExc_RuntimeError, "the replica was taken apart by the garbage collector");
  return -1;
}

static int check_held(const fdp_replica *replica)
{
  if (check_whole(replica) < 0) return -1;
  if (replica->tree->held) return 0;
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
  if (check_held(replica) < 0) return NULL;
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

/* Drops the copies of module `m` and what the forward left in it. */
static int empty_module(fdp_replica *replica, Py_ssize_t m, PyObject *trash)
{
  PyObject *dict = fdp_tree_dict_of(PyTuple_GET_ITEM(replica->modules, m)), *base_dict = NULL;
  int result = dict == NULL ? -1 : 0;
  if (result == 0 && !fdp_attributes_untouched(&replica->attributes[m], dict)) {
    base_dict = fdp_tree_dict_of(replica->tree->modules[m].module);
    result = base_dict == NULL ? -1 : fdp_attributes_sync(replica, m, base_dict, dict, trash);
  }
  if (result == 0) result = sync_children(replica, m, trash);
  if (result == 0) result = drop_entries(fdp_replica_own(replica, m, FDP_MEMBER_PARAMETERS), trash);
  if (result == 0) result = drop_entries(fdp_replica_own(replica, m, FDP_MEMBER_BUFFERS), trash);
  Py_XDECREF(base_dict);
  Py_XDECREF(dict);
  return result;
}

/* Leaves a module nothing but its own dictionaries: the next refresh writes the rest. */
static int strip_module(fdp_replica *replica, Py_ssize_t m, PyObject *trash)
{
  PyObject *dict = fdp_tree_dict_of(PyTuple_GET_ITEM(replica->modules, m));
  replica->attributes[m].known = false;
  int result = dict == NULL ? -1 : fdp_replica_empty_dict(dict, trash);
  for (int which = 0; result == 0 && which < FDP_MEMBER_COUNT; which++)
    result = PyDict_SetItem(dict, fdp_tree_member_name(&replica->tree->names, which),
                            fdp_replica_own(replica, m, which));
  Py_XDECREF(dict);
  return result;
}

static PyObject *replica_empty(PyObject *self, PyObject *strip)
{
  fdp_replica *replica = (fdp_replica *)self;
  int strips = PyObject_IsTrue(strip);
  if (strips < 0) return NULL;
  if (check_held(replica) < 0) return NULL;
  PyObject *trash = PyList_New(0);
  int result = trash == NULL ? -1 : 0;
  for (Py_ssize_t m = 0; result == 0 && m < replica->tree->module_count; m++)
    result = empty_module(replica, m, trash);
  for (Py_ssize_t m = 0; strips && result == 0 && m < replica->tree->module_count; m++)
    result = strip_module(replica, m, trash);
  Py_XDECREF(trash);
  if (result < 0) return NULL;
  Py_RETURN_NONE;
}

static PyObject *replica_settle(PyObject *self, PyObject *Py_UNUSED(ignored))
{
  fdp_replica *replica = (fdp_replica *)self;
  if (check_whole(replica) < 0) return NULL;
  for (Py_ssize_t m = 0; m < replica->tree->module_count; m++)
    replica->references[m] = Py_REFCNT(PyTuple_GET_ITEM(replica->modules, m));
  Py_RETURN_NONE;
}

static PyObject *replica_idle(PyObject *self, PyObject *Py_UNUSED(ignored))
{
  fdp_replica *replica = (fdp_replica *)self;
  bool same_counts = true;
  if (check_whole(replica) < 0) return NULL;
  for (Py_ssize_t m = 0; m < replica->tree->module_count; m++) {
    PyObject *module = PyTuple_GET_ITEM(replica->modules, m);
    if (Py_TYPE(module) != replica->tree->modules[m].type) Py_RETURN_FALSE;
    same_counts &= Py_REFCNT(module) == replica->references[m];
  }
  int held = same_counts ? 0 : fdp_replica_is_held_outside(replica);
  return held < 0 ? NULL : PyBool_FromLong(!held);
}

static int replica_fill(fdp_replica *replica, fdp_tree *tree, PyObject *modules)
{
  Py_ssize_t count = tree->module_count;
  replica->module_count = count;
  replica->tree = (fdp_tree *)Py_NewRef((PyObject *)tree);
  replica->modules = Py_NewRef(modules);
  replica->own = PyMem_Calloc((size_t)(count * FDP_MEMBER_COUNT + 1), sizeof(PyObject *));
  replica->references = PyMem_Calloc((size_t)count + 1, sizeof(Py_ssize_t));
  replica->attributes = PyMem_Calloc((size_t)count + 1, sizeof(fdp_attributes));
  replica->bound = PyMem_Calloc((size_t)count + 1, sizeof(Py_ssize_t));
  if (replica->own == NULL || replica->references == NULL || replica->attributes == NULL ||
      replica->bound == NULL) {
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
    for (int which = 0; which < FDP_MEMBER_COUNT; which++) {
      PyObject *own = fdp_tree_member(module, fdp_tree_member_name(&tree->names, which));
      if (own == NULL) return -1;
      replica->own[m * FDP_MEMBER_COUNT + which] = own;
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
  fdp_replica *replica = (fdp_replica *)self;
  PyObject_GC_UnTrack(self);
  replica_clear(self);
  for (Py_ssize_t m = 0; replica->attributes != NULL && m < replica->module_count; m++)
    PyMem_Free(replica->attributes[m].list);
  PyMem_Free(replica->attributes);
  PyMem_Free(replica->own);
  PyMem_Free(replica->references);
  PyMem_Free(replica->bound);
  type->tp_free(self);
  Py_DECREF(type);
}

static PyObject *replica_modules(PyObject *self, void *Py_UNUSED(closure))
{
  return check_whole((fdp_replica *)self) < 0 ? NULL : Py_NewRef(((fdp_replica *)self)->modules);
}

static PyMethodDef replica_methods[] = {
    {"refresh", (PyCFunction)(void (*)(void))replica_refresh, METH_FASTCALL,
     "refresh(parameters, buffers): makes every module as a new replica's, with these copies of "
     "the tensors that Tree.collect() found, in its order."},
    {"empty", replica_empty, METH_O,
     "empty(strip): drops the copies and whatever the forward left in the modules; with strip also "
     "what came from the base and can lead back to it."},
    {"settle", replica_settle, METH_NOARGS,
     "settle(): whoever holds a module of this replica now is no user of it."},
    {"idle", replica_idle, METH_NOARGS,
     "idle() -> bool: every module is of its class still, and nobody but the replica's own "
     "attributes holds one who did not at settle()."},
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

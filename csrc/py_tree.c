/* Tree: see py_tree.h. hold() and collect() are the first walk of a forward (is the tree the same,
 * which tensors are there now?), Replica.refresh (py_replica.c) is the second.
 *
 * Why in C: a ResNet-50 has some 3,500 attributes. nn.DataParallel copies them all, for each
 * replica and each forward; walking the dictionaries that somebody wrote to, base and replica side
 * by side, and writing what differs costs a hundredth of that (benchmarks/host_cost.py). */
#include "py_awaited.h"
#include "py_entries.h"
#include "py_gate.h"

#include <string.h>

static int names_fill(fdp_tree_names *names)
{
  static const char *const hook_names[FDP_TREE_HOOK_NAMES] = {
      "_forward_hooks",           "_forward_pre_hooks",
      "_backward_hooks",          "_backward_pre_hooks",
      "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
      "_forward_hooks_always_called", "_state_dict_hooks",
      "_state_dict_pre_hooks",    "_load_state_dict_pre_hooks",
      "_load_state_dict_post_hooks"};
  bool failed = false;
  failed |= (names->parameters = PyUnicode_InternFromString("_parameters")) == NULL;
  failed |= (names->buffers = PyUnicode_InternFromString("_buffers")) == NULL;
  failed |= (names->modules = PyUnicode_InternFromString("_modules")) == NULL;
  failed |= (names->is_replica = PyUnicode_InternFromString("_is_replica")) == NULL;
  failed |= (names->former_parameters = PyUnicode_InternFromString("_former_parameters")) == NULL;
  failed |= (names->copy = PyUnicode_InternFromString("copy")) == NULL;
  failed |= (names->compiled_call = PyUnicode_InternFromString("_compiled_call_impl")) == NULL;
  for (int i = 0; i < FDP_TREE_HOOK_NAMES; i++)
    failed |= (names->hooks[i] = PyUnicode_InternFromString(hook_names[i])) == NULL;
  return failed ? -1 : 0;
}

static void names_clear(fdp_tree_names *names)
{
  Py_CLEAR(names->parameters);
  Py_CLEAR(names->buffers);
  Py_CLEAR(names->modules);
  Py_CLEAR(names->is_replica);
  Py_CLEAR(names->former_parameters);
  Py_CLEAR(names->copy);
  Py_CLEAR(names->compiled_call);
  for (int i = 0; i < FDP_TREE_HOOK_NAMES; i++) Py_CLEAR(names->hooks[i]);
}

/* A new reference to the attribute dictionary of a module. */
PyObject *fdp_tree_dict_of(PyObject *module)
{
  PyObject *dict = PyObject_GenericGetDict(module, NULL);
  if (dict != NULL && !PyDict_Check(dict)) {
    PyErr_SetString(PyExc_TypeError, "a module's __dict__ is not a dictionary");
    Py_CLEAR(dict);
  }
  return dict;
}

/* Borrowed: one of the three dictionaries of a module, out of its attribute dictionary. */
static PyObject *find_member(PyObject *module, PyObject *dict, PyObject *name)
{
  PyObject *member = PyDict_GetItemWithError(dict, name);
  if (member != NULL && PyDict_Check(member)) return member;
  if (!PyErr_Occurred())
    PyErr_Format(PyExc_TypeError, "module of type %s has no dictionary %R (was __init__ called?)",
                 Py_TYPE(module)->tp_name, name);
  return NULL;
}

PyObject *fdp_tree_member(PyObject *module, PyObject *name)
{
  PyObject *dict = fdp_tree_dict_of(module);
  PyObject *member = dict == NULL ? NULL : Py_XNewRef(find_member(module, dict, name));
  Py_XDECREF(dict);
  return member;
}

PyObject *fdp_tree_member_of(fdp_tree *tree, Py_ssize_t m, int which)
{
  fdp_tree_module *record = &tree->modules[m];
  PyObject *dict = fdp_tree_dict_of(record->module);
  if (dict == NULL) return NULL;
  if (!fdp_tree_is_unwritten(dict, record->version)) {
    memset(record->members, 0, sizeof record->members);
    record->version = fdp_py_dict_version(dict);
  }
  if (record->members[which] == NULL)
    record->members[which] =
        find_member(record->module, dict, fdp_tree_member_name(&tree->names, which));
  PyObject *member = Py_XNewRef(record->members[which]);
  Py_DECREF(dict);
  return member;
}

/* 1 if module `m` still has the class and the children it had, 0 if not, -1 on error. */
static int module_unchanged(fdp_tree *tree, Py_ssize_t m)
{
  fdp_tree_module *record = &tree->modules[m];
  PyObject *children, *key, *child;
  Py_ssize_t position = 0, seen = 0;
  if (Py_TYPE(record->module) != record->type) return 0;
  children = fdp_tree_member_of(tree, m, FDP_MEMBER_MODULES);
  if (children == NULL) return -1;
  if (fdp_tree_is_unwritten(children, record->children_version)) {
    Py_DECREF(children);
    return 1;
  }
  while (PyDict_Next(children, &position, &key, &child)) {
    fdp_tree_child *expected = &tree->children[record->first_child + seen];
    if (seen == record->child_count) break;
    if (child == Py_None ? expected->index >= 0
                         : expected->index < 0 || tree->modules[expected->index].module != child)
      break;
    if (key != expected->name && PyUnicode_Compare(key, expected->name) != 0) break;
    seen++;
  }
  int same = seen == record->child_count && PyDict_GET_SIZE(children) == seen;
  if (same) record->children_version = fdp_py_dict_version(children);
  Py_DECREF(children);
  return PyErr_Occurred() ? -1 : same;
}

/* hold(root) -> bool: owns all modules until release() if the tree below `root` is the one that
 * this was made of. A module is read only after an earlier one, its parent, was seen to hold it. */
static PyObject *tree_hold(PyObject *self, PyObject *root)
{
  fdp_tree *tree = (fdp_tree *)self;
  if (tree->held) {
    PyErr_SetString(PyExc_RuntimeError, "hold: the tree is held already");
    return NULL;
  }
  if (!tree->is_filled || root != tree->modules[0].module) Py_RETURN_FALSE;
  for (Py_ssize_t m = 0; m < tree->module_count; m++) {
    int same = module_unchanged(tree, m);
    if (same < 0) return NULL;
    if (same == 0) Py_RETURN_FALSE;
  }
  for (Py_ssize_t m = 0; m < tree->module_count; m++) Py_INCREF(tree->modules[m].module);
  tree->held = true;
  Py_RETURN_TRUE;
}

/* collect() -> (parameters, buffers, pattern): the distinct tensors of a held tree as they are now,
 * in order of first appearance, and bytes that are equal where the same entries are tied. */
static PyObject *tree_collect(PyObject *self, PyObject *Py_UNUSED(ignored))
{
  fdp_tree *tree = (fdp_tree *)self;
  if (!tree->held) {
    PyErr_SetString(PyExc_RuntimeError, "collect: the tree is not held");
    return NULL;
  }
  if (fdp_entries_collect(tree, FDP_MEMBER_PARAMETERS, &tree->parameters) < 0 ||
      fdp_entries_collect(tree, FDP_MEMBER_BUFFERS, &tree->buffers) < 0)
    return NULL;
  PyObject *pattern = fdp_entries_pattern(tree);
  if (pattern == NULL) return NULL;
  PyObject *found = PyTuple_Pack(3, tree->parameters.tensors, tree->buffers.tensors, pattern);
  Py_DECREF(pattern);
  return found;
}

/* The index of a base module in the tree, or -1. */
Py_ssize_t fdp_tree_index_of(fdp_tree *tree, PyObject *module)
{
  Py_ssize_t index = -1;
  PyObject *key = PyLong_FromVoidPtr(module);
  if (key == NULL) return -1;
  PyObject *value = PyDict_GetItemWithError(tree->index_of, key);
  if (value != NULL) index = PyLong_AsSsize_t(value);
  Py_DECREF(key);
  return index;
}

static int record_children(fdp_tree *tree, Py_ssize_t m)
{
  PyObject *children = fdp_tree_member_of(tree, m, FDP_MEMBER_MODULES);
  PyObject *key, *child;
  Py_ssize_t position = 0, count;
  if (children == NULL) return -1;
  count = PyDict_GET_SIZE(children);
  fdp_tree_child *grown =
      PyMem_Realloc(tree->children, (size_t)(tree->child_count + count + 1) * sizeof(*grown));
  if (grown == NULL) {
    Py_DECREF(children);
    PyErr_NoMemory();
    return -1;
  }
  tree->children = grown;
  tree->modules[m].first_child = tree->child_count;
  while (PyDict_Next(children, &position, &key, &child)) {
    Py_ssize_t index = child == Py_None ? -1 : fdp_tree_index_of(tree, child);
    if (child != Py_None && index < 0) {
      if (!PyErr_Occurred())
        PyErr_Format(PyExc_ValueError, "modules: child %R is not in the list", key);
      Py_DECREF(children);
      return -1;
    }
    if (index > m) tree->modules[index].is_child = true;
    tree->children[tree->child_count].name = Py_NewRef(key);
    tree->children[tree->child_count].index = index;
    tree->child_count++;
    tree->modules[m].child_count++;
  }
  Py_DECREF(children);
  return 0;
}

static int tree_fill(fdp_tree *tree, PyObject *modules)
{
  Py_ssize_t count = PyTuple_GET_SIZE(modules);
  tree->index_of = PyDict_New();
  tree->modules = PyMem_Calloc((size_t)count + 1, sizeof(*tree->modules));
  if (tree->index_of == NULL || tree->modules == NULL) {
    if (!PyErr_Occurred()) PyErr_NoMemory();
    return -1;
  }
  for (Py_ssize_t m = 0; m < count; m++) {
    PyObject *module = PyTuple_GET_ITEM(modules, m);
    PyObject *key = PyLong_FromVoidPtr(module), *value = PyLong_FromSsize_t(m);
    int failed = key == NULL || value == NULL || PyDict_SetItem(tree->index_of, key, value) < 0;
    Py_XDECREF(key);
    Py_XDECREF(value);
    if (failed) return -1;
    tree->modules[m].module = module;
    tree->modules[m].type = (PyTypeObject *)Py_NewRef((PyObject *)Py_TYPE(module));
    tree->module_count++;
  }
  for (Py_ssize_t m = 0; m < count; m++)
    if (record_children(tree, m) < 0) return -1;
  for (Py_ssize_t m = 1; m < count; m++)
    if (!tree->modules[m].is_child) Py_INCREF(tree->modules[m].module);
  tree->is_filled = true;
  return 0;
}

/* Tree(modules): a tuple of all modules, the root first, each once; every child is in it. */
static PyObject *tree_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
  if (PyTuple_GET_SIZE(arguments) != 1 || (keywords != NULL && PyDict_GET_SIZE(keywords) > 0) ||
      !PyTuple_Check(PyTuple_GET_ITEM(arguments, 0)) ||
      PyTuple_GET_SIZE(PyTuple_GET_ITEM(arguments, 0)) == 0) {
    PyErr_SetString(PyExc_TypeError, "Tree takes one tuple of modules");
    return NULL;
  }
  fdp_tree *tree = (fdp_tree *)type->tp_alloc(type, 0);
  if (tree != NULL && (names_fill(&tree->names) < 0 ||
                       tree_fill(tree, PyTuple_GET_ITEM(arguments, 0)) < 0))
    Py_CLEAR(tree);
  return (PyObject *)tree;
}

static int tree_traverse(PyObject *self, visitproc visit, void *arg)
{
  fdp_tree *tree = (fdp_tree *)self;
  Py_VISIT(Py_TYPE(self));
  for (Py_ssize_t m = 0; m < tree->module_count; m++) {
    if (tree->held) Py_VISIT(tree->modules[m].module);
    if (tree->is_filled && m > 0 && !tree->modules[m].is_child) Py_VISIT(tree->modules[m].module);
    Py_VISIT(tree->modules[m].type);
  }
  Py_VISIT(tree->parameters.tensors);
  Py_VISIT(tree->buffers.tensors);
  return 0;
}

/* Drops modules and tensors; the records stay. */
static void let_go(fdp_tree *tree)
{
  bool held = tree->held;
  tree->held = false;
  for (Py_ssize_t m = 0; held && m < tree->module_count; m++) Py_DECREF(tree->modules[m].module);
  tree->parameters.count = tree->buffers.count = 0;
  Py_CLEAR(tree->parameters.tensors);
  Py_CLEAR(tree->buffers.tensors);
}

static int tree_clear(PyObject *self)
{
  fdp_tree *tree = (fdp_tree *)self;
  bool was_filled = tree->is_filled;
  let_go(tree);
  tree->is_filled = false; /* is held no more */
  for (Py_ssize_t m = 1; was_filled && m < tree->module_count; m++)
    if (!tree->modules[m].is_child) Py_DECREF(tree->modules[m].module);
  return 0;
}

static void tree_dealloc(PyObject *self)
{
  PyTypeObject *type = Py_TYPE(self);
  fdp_tree *tree = (fdp_tree *)self;
  PyObject_GC_UnTrack(self);
  tree_clear(self);
  for (Py_ssize_t c = 0; c < tree->child_count; c++) Py_DECREF(tree->children[c].name);
  for (Py_ssize_t m = 0; m < tree->module_count; m++) Py_DECREF(tree->modules[m].type);
  PyMem_Free(tree->children);
  PyMem_Free(tree->modules);
  PyMem_Free(tree->parameters.entries);
  PyMem_Free(tree->buffers.entries);
  Py_XDECREF(tree->index_of);
  names_clear(&tree->names);
  type->tp_free(self);
  Py_DECREF(type);
}

/* entries() -> [(parameters, buffers), ...]: for each module, which of the collected tensors its
 * dictionaries hold, as indices; -1 for None. */
static PyObject *tree_entries(PyObject *self, PyObject *Py_UNUSED(ignored))
{
  fdp_tree *tree = (fdp_tree *)self;
  PyObject *found = PyList_New(0);
  Py_ssize_t parameter_cursor = 0, buffer_cursor = 0;
  for (Py_ssize_t m = 0; found != NULL && m < tree->module_count; m++) {
    PyObject *parameters = NULL, *buffers = NULL, *row = NULL;
    if (!tree->held) PyErr_SetString(PyExc_RuntimeError, "entries: the tree is not held");
    if (tree->held) parameters = fdp_tree_member_of(tree, m, FDP_MEMBER_PARAMETERS);
    if (parameters != NULL) buffers = fdp_tree_member_of(tree, m, FDP_MEMBER_BUFFERS);
    Py_ssize_t parameter_count = parameters == NULL ? 0 : PyDict_GET_SIZE(parameters);
    Py_ssize_t buffer_count = buffers == NULL ? 0 : PyDict_GET_SIZE(buffers);
    if (buffers != NULL && parameter_cursor + parameter_count <= tree->parameters.count &&
        buffer_cursor + buffer_count <= tree->buffers.count)
      row = Py_BuildValue(
          "(NN)", fdp_entries_indices(&tree->parameters, &parameter_cursor, parameter_count),
          fdp_entries_indices(&tree->buffers, &buffer_cursor, buffer_count));
    else if (!PyErr_Occurred())
      PyErr_SetString(PyExc_RuntimeError, "entries: the tree changed since collect()");
    if (row == NULL || PyList_Append(found, row) < 0) Py_CLEAR(found);
    Py_XDECREF(row);
    Py_XDECREF(parameters);
    Py_XDECREF(buffers);
  }
  return found;
}

/* release() -> None: the end of hold(). */
static PyObject *tree_release(PyObject *self, PyObject *Py_UNUSED(ignored))
{
  let_go((fdp_tree *)self);
  Py_RETURN_NONE;
}

static PyMethodDef tree_methods[] = {
    {"hold", tree_hold, METH_O,
     "hold(root) -> bool: owns all modules until release(), if the tree below root is the one that "
     "this was made of."},
    {"collect", tree_collect, METH_NOARGS,
     "collect() -> (parameters, buffers, pattern): the distinct tensors of a held tree as they are "
     "now, and bytes that are equal where the same entries are tied."},
    {"entries", tree_entries, METH_NOARGS,
     "entries() -> [(parameters, buffers), ...]: for each module, which of the collected tensors "
     "its dictionaries hold, as indices; -1 for None."},
    {"release", tree_release, METH_NOARGS, "release(): drops modules and tensors."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot tree_slots[] = {
    {Py_tp_doc, "Tree(modules): a tuple of all modules, the root first, each once."},
    {Py_tp_new, tree_new},
    {Py_tp_dealloc, tree_dealloc},
    {Py_tp_traverse, tree_traverse},
    {Py_tp_clear, tree_clear},
    {Py_tp_methods, tree_methods},
    {0, NULL}};

static PyType_Spec tree_spec = {.name = "fastdp._C.Tree",
                                .basicsize = sizeof(fdp_tree),
                                .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC |
                                         Py_TPFLAGS_IMMUTABLETYPE,
                                .slots = tree_slots};

static int add_type(PyObject *module, PyType_Spec *spec)
{
  PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
  int result = type == NULL ? -1 : PyModule_AddType(module, (PyTypeObject *)type);
  Py_XDECREF(type);
  return result;
}

int fdp_py_tree_add(PyObject *module)
{
  if (add_type(module, &tree_spec) < 0) return -1;
  if (add_type(module, &fdp_replica_spec) < 0) return -1;
  if (fdp_py_gate_add(module) < 0) return -1;
  return fdp_py_awaited_add(module);
}

/* How a Snapshot (py_snapshot.h) is filled.
 *
 * A container is copied first, with nothing in between that can run code, and what was copied is
 * looked at afterwards: a look at a class may run anything, and by then no dictionary is walked. */
#include "py_snapshot.h"

#include <string.h>

#include "py_producer.h"
#include "py_tree.h"

/* What is needed only while a snapshot is filled. */
typedef struct fdp_snapshot_maker {
  fdp_snapshot *snapshot;
  fdp_py_state *state;
  PyObject *modules; /* dict: id(module) -> its index */
  PyObject *tensors; /* set: ids of the modules' parameters and buffers */
  PyObject *seen;    /* set: ids of the containers that have a box */
  PyObject *records; /* tuple of classes */
  PyObject *names[3]; /* "_parameters", "_buffers", and the former's second name in a replica */
  PyObject *children, *dataclass, *deque;
  Py_ssize_t left; /* entries of containers that it may still take */
} fdp_snapshot_maker;

/* 1 if the object's address is in a set or dict of addresses, 0 if not, -1 on error. */
static int has_id(PyObject *ids, PyObject *object)
{
  PyObject *id = PyLong_FromVoidPtr(object);
  if (id == NULL) return -1;
  int found = PyDict_Check(ids) ? PyDict_Contains(ids, id) : PySet_Contains(ids, id);
  Py_DECREF(id);
  return found;
}

static int add_id(PyObject *set, PyObject *object)
{
  PyObject *id = PyLong_FromVoidPtr(object);
  int result = id == NULL ? -1 : PySet_Add(set, id);
  Py_XDECREF(id);
  return result;
}

/* Room for one more item of an array that doubles. */
static int make_room(void *array, Py_ssize_t count, Py_ssize_t *capacity, size_t item_bytes)
{
  void *items, *grown;
  if (count < *capacity) return 0;
  memcpy(&items, array, sizeof items);
  grown = PyMem_Realloc(items, (size_t)(*capacity * 2 + 64) * item_bytes);
  if (grown == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  memcpy(array, &grown, sizeof grown);
  *capacity = *capacity * 2 + 64;
  return 0;
}

static int add_entry(fdp_snapshot_maker *maker, fdp_box_kind kind, PyObject *key, PyObject *value)
{
  fdp_snapshot *snapshot = maker->snapshot;
  PyObject *self = NULL;
  if (make_room(&snapshot->entries, snapshot->entry_count, &snapshot->entry_capacity,
                sizeof(fdp_box_entry)) < 0)
    return -1;
  if (kind == FDP_BOX_TENSORS && value != Py_None) value = NULL;
  if (value != NULL && PyMethod_Check(value)) {
    int ours = has_id(maker->modules, PyMethod_GET_SELF(value));
    if (ours < 0) return -1;
    if (ours) {
      self = PyMethod_GET_SELF(value);
      value = PyMethod_GET_FUNCTION(value);
    }
  }
  if (self == NULL && value != NULL && PyType_HasFeature(Py_TYPE(value), Py_TPFLAGS_HEAPTYPE)) {
    int ours = has_id(maker->modules, value);
    if (ours < 0) return -1;
    if (ours) {
      self = value;
      value = NULL;
    }
  }
  if (key != NULL && PyList_Append(snapshot->kept, key) < 0) return -1;
  if (value != NULL && PyList_Append(snapshot->kept, value) < 0) return -1;
  snapshot->entries[snapshot->entry_count++] = (fdp_box_entry){key, value, self};
  return 0;
}

static int copy_dict(fdp_snapshot_maker *maker, fdp_box_kind kind, PyObject *dict)
{
  PyObject *key, *value;
  Py_ssize_t position = 0;
  while (PyDict_Next(dict, &position, &key, &value))
    if (add_entry(maker, kind, key, value) < 0) return -1;
  return 0;
}

/* The items of what is walked by an iterator only, or the entries of an OrderedDict. */
static int copy_items(fdp_snapshot_maker *maker, fdp_box_kind kind, PyObject *object)
{
  PyObject *items = PySequence_List(object);
  int result = items == NULL ? -1 : 0;
  for (Py_ssize_t i = 0; result == 0 && i < PyList_GET_SIZE(items); i++) {
    PyObject *item = PyList_GET_ITEM(items, i);
    if (kind != FDP_BOX_ORDERED) {
      result = add_entry(maker, kind, NULL, item);
      continue;
    }
    PyObject *value = PyDict_GetItemWithError(object, item);
    if (value == NULL && !PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, item);
    result = value == NULL ? -1 : add_entry(maker, kind, item, value);
  }
  Py_XDECREF(items);
  return result;
}

static int copy_attributes(fdp_snapshot_maker *maker, fdp_box_kind kind, PyObject *object)
{
  PyObject *dict = fdp_tree_dict_of(object);
  int result = dict == NULL ? -1 : copy_dict(maker, kind, dict);
  Py_XDECREF(dict);
  return result;
}

static int copy_sequence(fdp_snapshot_maker *maker, fdp_box_kind kind, PyObject *object)
{
  Py_ssize_t size = kind == FDP_BOX_LIST ? PyList_GET_SIZE(object) : PyTuple_GET_SIZE(object);
  for (Py_ssize_t i = 0; i < size; i++) {
    PyObject *item =
        kind == FDP_BOX_LIST ? PyList_GET_ITEM(object, i) : PyTuple_GET_ITEM(object, i);
    if (add_entry(maker, kind, NULL, item) < 0) return -1;
  }
  return 0;
}

/* Copies the entries of box `b`; `module` is what a module's box does not own. */
static int fill_box(fdp_snapshot_maker *maker, Py_ssize_t b, PyObject *module)
{
  fdp_snapshot *snapshot = maker->snapshot;
  fdp_box *box = &snapshot->boxes[b];
  int result = 0;
  box->first = snapshot->entry_count;
  switch (box->kind) {
    case FDP_BOX_MODULE:
      result = copy_attributes(maker, box->kind, module);
      break;
    case FDP_BOX_RECORD:
      result = copy_attributes(maker, box->kind, box->object);
      break;
    case FDP_BOX_DICT:
    case FDP_BOX_TENSORS:
      result = copy_dict(maker, box->kind, box->object);
      break;
    case FDP_BOX_LIST:
    case FDP_BOX_TUPLE:
      result = copy_sequence(maker, box->kind, box->object);
      break;
    case FDP_BOX_LARGE:
      return 0;
    default:
      result = copy_items(maker, box->kind, box->object);
  }
  box->count = snapshot->entry_count - box->first;
  return result;
}

/* 1 if the object is one whose attributes are plain data: of a class among the records, or of a
 * dataclass. 0, or -1 on error. */
static int is_record(fdp_snapshot_maker *maker, PyObject *object)
{
  PyTypeObject *type = Py_TYPE(object);
  PyObject *fields = NULL, *dict = NULL;
  int found = 0;
  for (Py_ssize_t i = 0; !found && i < PyTuple_GET_SIZE(maker->records); i++)
    found = PyType_IsSubtype(type, (PyTypeObject *)PyTuple_GET_ITEM(maker->records, i));
  if (!found && PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE)) {
    fields = PyObject_GetAttr((PyObject *)type, maker->dataclass);
    found = fields != NULL;
  }
  if (found) dict = PyObject_GenericGetDict(object, NULL);
  found = dict != NULL && PyDict_Check(dict);
  Py_XDECREF(dict);
  Py_XDECREF(fields);
  if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
  PyErr_Clear();
  return found;
}

/* Notes a tensor that is neither parameter nor buffer of the modules. */
static int note_tensor(fdp_snapshot_maker *maker, Py_ssize_t b, Py_ssize_t entry, PyObject *tensor)
{
  fdp_snapshot *snapshot = maker->snapshot;
  int registered = has_id(maker->tensors, tensor);
  if (registered != 0) return registered;
  if (make_room(&snapshot->tensors, snapshot->tensor_count, &snapshot->tensor_capacity,
                sizeof(fdp_box_tensor)) < 0)
    return -1;
  PyObject *on_host = PyObject_GetAttrString(tensor, "is_cpu");
  PyErr_Clear();
  fdp_box_tensor *record = &snapshot->tensors[snapshot->tensor_count++];
  record->box = b;
  record->entry = entry;
  record->address = fdp_snapshot_address(snapshot, tensor);
  record->version = on_host == Py_True ? fdp_snapshot_version(snapshot, tensor) : -1;
  Py_XDECREF(on_host);
  return 0;
}

/* 1: torch.Tensor or Parameter itself (a subclass may answer in Python); 0: not; -1: error. */
static int is_plain_tensor(fdp_snapshot_maker *maker, PyObject *object)
{
  const char *dot = strrchr(Py_TYPE(object)->tp_name, '.');
  const char *name = dot == NULL ? Py_TYPE(object)->tp_name : dot + 1;
  fdp_py_producer producer;
  if (strcmp(name, "Tensor") != 0 && strcmp(name, "Parameter") != 0) return 0;
  if (fdp_py_producer_find(maker->state, Py_TYPE(object), &producer) < 0) return -1;
  return producer.is_torch && producer.way != FDP_PY_WAY_REFUSED;
}

/* The kind of box for the value of an entry of box `b`; -1: none, -2: an error. */
static int kind_of(fdp_snapshot_maker *maker, const fdp_box *box, const fdp_box_entry *entry)
{
  PyObject *value = entry->value;
  PyTypeObject *type = Py_TYPE(value);
  if (box->kind == FDP_BOX_MODULE && PyDict_Check(value))
    for (int i = 0; i < 3; i++)
      if (fdp_tree_is_name(entry->key, maker->names[i])) return FDP_BOX_TENSORS;
  if (type == &PyODict_Type) return FDP_BOX_ORDERED;
  if (PyDict_Check(value)) return FDP_BOX_DICT;
  if (PyList_Check(value)) return FDP_BOX_LIST;
  if (PyTuple_Check(value)) return FDP_BOX_TUPLE;
  if (type == &PySet_Type) return FDP_BOX_SET;
  if ((PyObject *)type == maker->deque) return FDP_BOX_DEQUE;
  if (PyType_Check(value)) return -1;
  int record = is_record(maker, value);
  return record < 0 ? -2 : record ? FDP_BOX_RECORD : -1;
}

static Py_ssize_t size_of(fdp_box_kind kind, PyObject *object)
{
  if (kind != FDP_BOX_RECORD) return fdp_snapshot_size(object);
  PyObject *dict = fdp_tree_dict_of(object);
  Py_ssize_t size = dict == NULL ? -1 : PyDict_GET_SIZE(dict);
  Py_XDECREF(dict);
  return size;
}

/* Gives the value of one entry of box `b` a box of its own, if it is a container not seen yet. */
static int look_into(fdp_snapshot_maker *maker, Py_ssize_t b, Py_ssize_t entry)
{
  fdp_snapshot *snapshot = maker->snapshot;
  fdp_box box = snapshot->boxes[b];
  PyObject *value = snapshot->entries[entry].value;
  if (value == NULL || value == Py_None || snapshot->entries[entry].self != NULL) return 0;
  int tensor = is_plain_tensor(maker, value);
  if (tensor != 0) return tensor < 0 ? -1 : note_tensor(maker, b, entry, value);
  int kind = kind_of(maker, &box, &snapshot->entries[entry]);
  if (kind < 0) return kind == -1 ? 0 : -1;
  int seen = box.depth == FDP_SNAPSHOT_DEPTH ? 1 : has_id(maker->seen, value);
  if (seen != 0) return seen < 0 ? -1 : 0;
  Py_ssize_t size = size_of((fdp_box_kind)kind, value);
  if (size < 0 || add_id(maker->seen, value) < 0 ||
      make_room(&snapshot->boxes, snapshot->box_count, &snapshot->box_capacity,
                sizeof(fdp_box)) < 0)
    return -1;
  /* The model's own structure is always seen. */
  bool counts = kind != FDP_BOX_TENSORS &&
                !(box.kind == FDP_BOX_MODULE &&
                  fdp_tree_is_name(snapshot->entries[entry].key, maker->children));
  if (counts && size > maker->left && kind == FDP_BOX_RECORD) return 0;
  if (counts && size > maker->left) kind = FDP_BOX_LARGE;
  fdp_box made = {.object = value, .parent = b, .place = entry, .kind = (fdp_box_kind)kind,
                  .depth = box.depth + 1, .count = size};
  if (counts && kind != FDP_BOX_LARGE) maker->left -= size;
  snapshot->boxes[snapshot->box_count++] = made;
  return 0;
}

static int note_registered(fdp_snapshot_maker *maker, PyObject *module, PyObject *name)
{
  PyObject *attributes = fdp_tree_dict_of(module), *key, *value;
  Py_ssize_t position = 0;
  if (attributes == NULL) return -1;
  /* A scripted module has none. */
  PyObject *dict = PyDict_GetItemWithError(attributes, name);
  int result = PyErr_Occurred() ? -1 : 0;
  while (result == 0 && dict != NULL && PyDict_Check(dict) &&
         PyDict_Next(dict, &position, &key, &value))
    if (value != Py_None) result = add_id(maker->tensors, value);
  Py_DECREF(attributes);
  return result;
}

static int add_module(fdp_snapshot_maker *maker, Py_ssize_t m, PyObject *module)
{
  fdp_snapshot *snapshot = maker->snapshot;
  if (PyType_Check(module) || !PyType_SUPPORTS_WEAKREFS(Py_TYPE(module))) {
    PyErr_Format(PyExc_TypeError, "modules[%zd]: expected a module, not %R", m,
                 PyType_Check(module) ? module : (PyObject *)Py_TYPE(module));
    return -1;
  }
  PyObject *weak = PyWeakref_NewRef(module, NULL), *id = PyLong_FromVoidPtr(module);
  PyObject *index = PyLong_FromSsize_t(m);
  int result = weak == NULL || id == NULL || index == NULL ? -1 : 0;
  if (result == 0) {
    PyTuple_SET_ITEM(snapshot->weak, m, Py_NewRef(weak));
    snapshot->types[m] = Py_TYPE(module);
    result = PyList_Append(snapshot->kept, (PyObject *)Py_TYPE(module));
  }
  if (result == 0) result = PyDict_SetItem(maker->modules, id, index);
  if (result == 0) result = note_registered(maker, module, maker->names[0]);
  if (result == 0) result = note_registered(maker, module, maker->names[1]);
  if (result == 0)
    result = make_room(&snapshot->boxes, snapshot->box_count, &snapshot->box_capacity,
                       sizeof(fdp_box));
  if (result == 0)
    snapshot->boxes[snapshot->box_count++] =
        (fdp_box){.parent = -1, .place = -1, .kind = FDP_BOX_MODULE};
  Py_XDECREF(weak);
  Py_XDECREF(id);
  Py_XDECREF(index);
  return result;
}

static int fill_boxes(fdp_snapshot_maker *maker, PyObject *modules)
{
  fdp_snapshot *snapshot = maker->snapshot;
  snapshot->module_count = PyTuple_GET_SIZE(modules);
  snapshot->types = PyMem_Calloc((size_t)snapshot->module_count + 1, sizeof(PyTypeObject *));
  if (snapshot->types == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  for (Py_ssize_t m = 0; m < snapshot->module_count; m++)
    if (add_module(maker, m, PyTuple_GET_ITEM(modules, m)) < 0) return -1;
  for (Py_ssize_t b = 0; b < snapshot->box_count; b++) {
    PyObject *module = b < snapshot->module_count ? PyTuple_GET_ITEM(modules, b) : NULL;
    if (fill_box(maker, b, module) < 0) return -1;
    Py_ssize_t end = snapshot->boxes[b].first + snapshot->boxes[b].count;
    if (snapshot->boxes[b].kind == FDP_BOX_LARGE || snapshot->boxes[b].kind == FDP_BOX_TENSORS)
      continue;
    for (Py_ssize_t i = snapshot->boxes[b].first; i < end; i++)
      if (look_into(maker, b, i) < 0) return -1;
  }
  return 0;
}

static int maker_open(fdp_snapshot_maker *maker)
{
  static const char *const names[3] = {"_parameters", "_buffers", "_former_parameters"};
  PyObject *collections = PyImport_ImportModule("collections");
  bool failed = collections == NULL;
  if (!failed) failed = (maker->deque = PyObject_GetAttrString(collections, "deque")) == NULL;
  Py_XDECREF(collections);
  failed = failed || (maker->modules = PyDict_New()) == NULL;
  failed = failed || (maker->tensors = PySet_New(NULL)) == NULL;
  failed = failed || (maker->seen = PySet_New(NULL)) == NULL;
  if (!failed) maker->dataclass = PyUnicode_InternFromString("__dataclass_fields__");
  failed = failed || maker->dataclass == NULL;
  if (!failed) maker->children = PyUnicode_InternFromString("_modules");
  failed = failed || maker->children == NULL;
  for (int i = 0; i < 3; i++)
    failed = failed || (maker->names[i] = PyUnicode_InternFromString(names[i])) == NULL;
  return failed ? -1 : 0;
}

int fdp_snapshot_fill(fdp_snapshot *snapshot, fdp_py_state *state, PyObject *modules,
                      PyObject *records)
{
  fdp_snapshot_maker maker = {
      .snapshot = snapshot, .state = state, .records = records, .left = FDP_SNAPSHOT_ENTRIES};
  int result = maker_open(&maker);
  if (result == 0) result = fill_boxes(&maker, modules);
  Py_XDECREF(maker.modules);
  Py_XDECREF(maker.tensors);
  Py_XDECREF(maker.seen);
  Py_XDECREF(maker.dataclass);
  Py_XDECREF(maker.children);
  Py_XDECREF(maker.deque);
  for (int i = 0; i < 3; i++) Py_XDECREF(maker.names[i]);
  return result;
}

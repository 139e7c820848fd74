/* Whether anything differs from a Snapshot (py_snapshot.h): one walk over its boxes. Nothing here
 * runs code of the values', so no dictionary changes while it is walked. */
#include "py_snapshot.h"

#include <math.h>
#include <string.h>

#include "py_tree.h"

/* Tuples in tuples further down than this are compared by identity. */
#define TUPLE_DEPTH 16

static bool same_double(double a, double b)
{
  return memcmp(&a, &b, sizeof a) == 0 || (isnan(a) && isnan(b));
}

static bool equal_by_type(PyObject *a, PyObject *b)
{
  int equal = PyObject_RichCompareBool(a, b, Py_EQ);
  if (equal < 0) PyErr_Clear();
  return equal > 0;
}

static bool same_value(PyObject *old, PyObject *now, int depth)
{
  PyTypeObject *type = Py_TYPE(old);
  if (old == now) return true;
  if (type != Py_TYPE(now)) return false;
  if (type == &PyFloat_Type) return same_double(PyFloat_AS_DOUBLE(old), PyFloat_AS_DOUBLE(now));
  if (type == &PyLong_Type || type == &PyUnicode_Type || type == &PyBytes_Type)
    return equal_by_type(old, now);
  if (type == &PyComplex_Type) {
    Py_complex a = PyComplex_AsCComplex(old), b = PyComplex_AsCComplex(now);
    return same_double(a.real, b.real) && same_double(a.imag, b.imag);
  }
  if (type == &PyMethod_Type)
    return PyMethod_GET_SELF(old) == PyMethod_GET_SELF(now) &&
           PyMethod_GET_FUNCTION(old) == PyMethod_GET_FUNCTION(now);
  /* torch.Size and named tuples too: a tuple without attributes of its own is its items. */
  if (PyTuple_Check(old) && type->tp_dictoffset == 0) {
    Py_ssize_t size = PyTuple_GET_SIZE(old);
    bool same = size == PyTuple_GET_SIZE(now) && depth < TUPLE_DEPTH;
    for (Py_ssize_t i = 0; same && i < size; i++)
      same = same_value(PyTuple_GET_ITEM(old, i), PyTuple_GET_ITEM(now, i), depth + 1);
    return same;
  }
  /* A new object at every read of tensor.device. */
  return strcmp(type->tp_name, "torch.device") == 0 && equal_by_type(old, now);
}

bool fdp_difference_same(PyObject *old, PyObject *now) { return same_value(old, now, 0); }

bool fdp_difference_same_entry(fdp_box_kind kind, const fdp_box_entry *entry, PyObject *value)
{
  if (kind == FDP_BOX_TENSORS) return (entry->value == Py_None) == (value == Py_None);
  if (entry->self != NULL && entry->value == NULL) return value == entry->self;
  if (entry->self != NULL)
    return PyMethod_Check(value) && PyMethod_GET_SELF(value) == entry->self &&
           PyMethod_GET_FUNCTION(value) == entry->value;
  return same_value(entry->value, value, 0);
}

static bool same_dict(const fdp_box *box, const fdp_box_entry *entry, PyObject *dict)
{
  PyObject *key, *value;
  Py_ssize_t position = 0;
  if (PyDict_GET_SIZE(dict) != box->count) return false;
  for (; PyDict_Next(dict, &position, &key, &value); entry++) {
    if (key == entry->key && value == entry->value && entry->self == NULL) continue;
    if (!same_value(entry->key, key, 0) || !fdp_difference_same_entry(box->kind, entry, value))
      return false;
  }
  return true;
}

/* What is not walked in place: sets and deques, and an OrderedDict, whose own order PyDict_Next
 * does not follow. 1, 0, or -1 with an exception. */
static int same_by_iterator(const fdp_box *box, const fdp_box_entry *entry)
{
  PyObject *items = PySequence_List(box->object);
  if (items == NULL) return -1;
  int same = PyList_GET_SIZE(items) == box->count;
  for (Py_ssize_t i = 0; same == 1 && i < box->count; i++, entry++) {
    PyObject *item = PyList_GET_ITEM(items, i);
    if (box->kind != FDP_BOX_ORDERED) {
      same = fdp_difference_same_entry(box->kind, entry, item);
      continue;
    }
    PyObject *value = PyDict_GetItemWithError(box->object, item);
    if (value == NULL && PyErr_Occurred()) same = -1;
    if (same == 1)
      same = value != NULL && same_value(entry->key, item, 0) &&
             fdp_difference_same_entry(box->kind, entry, value);
  }
  Py_DECREF(items);
  return same;
}

/* 1 if a container holds what it held, 0 if not, -1 with an exception. */
static int same_box(const fdp_snapshot *snapshot, const fdp_box *box)
{
  const fdp_box_entry *entry = &snapshot->entries[box->first];
  PyObject *object = box->object;
  switch (box->kind) {
    case FDP_BOX_ORDERED:
      if (box->count > 1 && PyDict_GET_SIZE(object) == box->count)
        return same_by_iterator(box, entry);
      return same_dict(box, entry, object);
    case FDP_BOX_DICT:
    case FDP_BOX_TENSORS:
      return same_dict(box, entry, object);
    case FDP_BOX_LIST:
      if (PyList_GET_SIZE(object) != box->count) return 0;
      for (Py_ssize_t i = 0; i < box->count; i++) {
        PyObject *item = PyList_GET_ITEM(object, i);
        if (item != entry[i].value && !fdp_difference_same_entry(box->kind, &entry[i], item))
          return 0;
      }
      return 1;
    case FDP_BOX_SET:
    case FDP_BOX_DEQUE:
    case FDP_BOX_LARGE: {
      Py_ssize_t size = fdp_snapshot_size(object);
      if (size < 0) return -1;
      if (size != box->count) return 0;
      return size == 0 || box->kind == FDP_BOX_LARGE || same_by_iterator(box, entry);
    }
    default:
      return 1;
  }
}

/* None, a text, or NULL: one container, or one object's attributes. */
static PyObject *container_difference(const fdp_snapshot *snapshot, Py_ssize_t b)
{
  const fdp_box *box = &snapshot->boxes[b];
  if (box->kind != FDP_BOX_RECORD) {
    int same = same_box(snapshot, box);
    if (same == 1) return Py_NewRef(Py_None);
    return same < 0 ? NULL : fdp_difference_text(snapshot, b, box->object);
  }
  PyObject *dict = PyObject_GenericGetDict(box->object, NULL), *text;
  if (dict == NULL) return NULL;
  if (same_dict(box, &snapshot->entries[box->first], dict))
    text = Py_NewRef(Py_None);
  else
    text = fdp_difference_text(snapshot, b, dict);
  Py_DECREF(dict);
  return text;
}

/* `*gone`: the last module that is no more. Its address may be another's by now, so an entry that
 * seems to hold it still proves nothing; but one that does not is the better text. */
static PyObject *module_difference(const fdp_snapshot *snapshot, Py_ssize_t m, Py_ssize_t *gone)
{
  const fdp_box *box = &snapshot->boxes[m];
  const char *was = snapshot->types[m]->tp_name;
  PyObject *module = fdp_py_weakref_get(PyTuple_GET_ITEM(snapshot->weak, m));
  PyObject *dict = NULL, *text = NULL;
  if (module == NULL) {
    *gone = m;
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
  }
  if (Py_TYPE(module) != snapshot->types[m]) {
    text = PyUnicode_FromFormat("the class of %s changed to %s (modules[%zd])", was,
                                Py_TYPE(module)->tp_name, m);
    goto done;
  }
  dict = fdp_tree_dict_of(module);
  if (dict == NULL) goto done;
  if (same_dict(box, &snapshot->entries[box->first], dict))
    text = Py_NewRef(Py_None);
  else
    text = fdp_difference_text(snapshot, m, dict);
done:
  Py_XDECREF(dict);
  Py_DECREF(module);
  return text;
}

static PyObject *tensor_difference(const fdp_snapshot *snapshot, const fdp_box_tensor *record)
{
  PyObject *tensor = snapshot->entries[record->entry].value;
  if (record->address >= 0 && fdp_snapshot_address(snapshot, tensor) != record->address)
    return fdp_difference_entry(snapshot, record->box, record->entry,
                                "was given other memory, a tensor");
  if (record->version >= 0 && fdp_snapshot_version(snapshot, tensor) != record->version)
    return fdp_difference_entry(snapshot, record->box, record->entry,
                                "was written in place, a tensor on the host");
  return Py_NewRef(Py_None);
}

PyObject *fdp_difference_find(const fdp_snapshot *snapshot)
{
  PyObject *text = Py_NewRef(Py_None);
  Py_ssize_t gone = -1;
  for (Py_ssize_t b = 0; text == Py_None && b < snapshot->box_count; b++) {
    Py_DECREF(text);
    text = b < snapshot->module_count ? module_difference(snapshot, b, &gone)
                                      : container_difference(snapshot, b);
  }
  for (Py_ssize_t i = 0; text == Py_None && i < snapshot->tensor_count; i++) {
    Py_DECREF(text);
    text = tensor_difference(snapshot, &snapshot->tensors[i]);
  }
  if (text != Py_None || gone < 0) return text;
  Py_DECREF(text);
  return PyUnicode_FromFormat("a module of class %s is gone (modules[%zd])",
                              snapshot->types[gone]->tp_name, gone);
}

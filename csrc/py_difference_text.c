/* How a difference from a Snapshot is told: the entry it was found at, as Python would write it,
 * and what happened there. Slow, since it runs once and then the snapshot has served its turn. */
#include "py_snapshot.h"

#include <string.h>

/* Values longer than this are not shown. */
#define SHOWN_CHARACTERS 60

static bool has_names(fdp_box_kind kind)
{
  return kind == FDP_BOX_MODULE || kind == FDP_BOX_RECORD;
}

static const char *short_name(PyTypeObject *type)
{
  const char *dot = strrchr(type->tp_name, '.');
  return dot == NULL ? type->tp_name : dot + 1;
}

/* New reference: repr() of a value that is plain and short, else NULL without an exception. */
static PyObject *shown(PyObject *value)
{
  PyTypeObject *type = Py_TYPE(value);
  PyObject *text = NULL;
  if (value == Py_None || type == &PyBool_Type || type == &PyLong_Type || type == &PyFloat_Type ||
      (type == &PyUnicode_Type && PyUnicode_GET_LENGTH(value) <= SHOWN_CHARACTERS))
    text = PyObject_Repr(value);
  if (text != NULL && PyUnicode_GET_LENGTH(text) > SHOWN_CHARACTERS + 2) Py_CLEAR(text);
  PyErr_Clear();
  return text;
}

static PyObject *box_path(const fdp_snapshot *snapshot, Py_ssize_t b);

/* New reference: where an entry of box `b` is found; `key`, or NULL for the one with that index. */
static PyObject *entry_path(const fdp_snapshot *snapshot, Py_ssize_t b, PyObject *key,
                            Py_ssize_t index)
{
  fdp_box_kind kind = snapshot->boxes[b].kind;
  PyObject *path = box_path(snapshot, b), *text = NULL, *key_text = NULL;
  if (path == NULL) return NULL;
  if (key == NULL)
    text = kind == FDP_BOX_SET ? PyUnicode_FromFormat("an element of %U", path)
                               : PyUnicode_FromFormat("%U[%zd]", path, index);
  else if (has_names(kind) && PyUnicode_CheckExact(key))
    text = PyUnicode_FromFormat("%U.%U", path, key);
  else if ((key_text = shown(key)) != NULL)
    text = PyUnicode_FromFormat("%U[%U]", path, key_text);
  else
    text = PyUnicode_FromFormat("%U[a %s]", path, short_name(Py_TYPE(key)));
  Py_XDECREF(key_text);
  Py_DECREF(path);
  return text;
}

static PyObject *box_path(const fdp_snapshot *snapshot, Py_ssize_t b)
{
  const fdp_box *box = &snapshot->boxes[b];
  if (box->parent < 0) return PyUnicode_FromString(short_name(snapshot->types[b]));
  return entry_path(snapshot, box->parent, snapshot->entries[box->place].key,
                    box->place - snapshot->boxes[box->parent].first);
}

/* Takes `path` over: "<path> <what> (modules[m])". */
static PyObject *finished(const fdp_snapshot *snapshot, Py_ssize_t b, PyObject *path,
                          PyObject *what)
{
  PyObject *text = NULL;
  while (snapshot->boxes[b].parent >= 0) b = snapshot->boxes[b].parent;
  if (path != NULL && what != NULL)
    text = PyUnicode_FromFormat("%U %U (modules[%zd])", path, what, b);
  Py_XDECREF(path);
  Py_XDECREF(what);
  return text;
}

PyObject *fdp_difference_entry(const fdp_snapshot *snapshot, Py_ssize_t b, Py_ssize_t entry,
                               const char *what)
{
  PyObject *path = entry_path(snapshot, b, snapshot->entries[entry].key,
                              entry - snapshot->boxes[b].first);
  return finished(snapshot, b, path, PyUnicode_FromString(what));
}

/* One entry has another value than it had. */
static PyObject *changed_entry(const fdp_snapshot *snapshot, Py_ssize_t b, Py_ssize_t entry,
                               PyObject *now)
{
  PyObject *was = snapshot->entries[entry].value, *old_text = NULL, *new_text = NULL, *what;
  if (snapshot->boxes[b].kind == FDP_BOX_TENSORS)
    return fdp_difference_entry(snapshot, b, entry,
                                now == Py_None ? "is None now" : "is no longer None");
  if (snapshot->entries[entry].self != NULL)
    return fdp_difference_entry(
        snapshot, b, entry, was == NULL ? "was replaced (a module)" : "was replaced (a method)");
  old_text = shown(was);
  new_text = shown(now);
  if (old_text != NULL && new_text != NULL)
    what = PyUnicode_FromFormat("changed from %U to %U", old_text, new_text);
  else
    what = PyUnicode_FromFormat("was replaced (%s, now %s)", short_name(Py_TYPE(was)),
                                short_name(Py_TYPE(now)));
  Py_XDECREF(old_text);
  Py_XDECREF(new_text);
  PyObject *path = entry_path(snapshot, b, snapshot->entries[entry].key,
                              entry - snapshot->boxes[b].first);
  return finished(snapshot, b, path, what);
}

/* The value under a key, a new reference; NULL without an exception if there is none. Keys of
 * other classes than str and int are found by identity, since comparing them may run any code. */
static PyObject *value_under(PyObject *dict, PyObject *wanted)
{
  PyObject *key, *value;
  Py_ssize_t position = 0;
  if (PyUnicode_CheckExact(wanted) || PyLong_CheckExact(wanted)) {
    value = PyDict_GetItemWithError(dict, wanted);
    return Py_XNewRef(value);
  }
  while (PyDict_Next(dict, &position, &key, &value))
    if (key == wanted) return Py_NewRef(value);
  return NULL;
}

/* New reference: a key that the box does not have; NULL without an exception if there is none. */
static PyObject *added_key(const fdp_snapshot *snapshot, const fdp_box *box, PyObject *dict)
{
  PyObject *key, *value;
  Py_ssize_t position = 0;
  while (PyDict_Next(dict, &position, &key, &value)) {
    Py_ssize_t i = 0;
    while (i < box->count &&
           !fdp_difference_same(snapshot->entries[box->first + i].key, key))
      i++;
    if (i == box->count) return Py_NewRef(key);
  }
  return NULL;
}

static PyObject *dict_text(const fdp_snapshot *snapshot, Py_ssize_t b, PyObject *dict)
{
  const fdp_box *box = &snapshot->boxes[b];
  for (Py_ssize_t i = box->first; i < box->first + box->count; i++) {
    const fdp_box_entry *entry = &snapshot->entries[i];
    PyObject *now = value_under(dict, entry->key), *text = NULL;
    if (now == NULL) {
      if (PyErr_Occurred()) return NULL;
      return fdp_difference_entry(snapshot, b, i, "was removed");
    }
    if (!fdp_difference_same_entry(box->kind, entry, now)) {
      text = changed_entry(snapshot, b, i, now);
      Py_DECREF(now);
      return text;
    }
    Py_DECREF(now);
  }
  PyObject *key = added_key(snapshot, box, dict);
  if (key != NULL) {
    PyObject *path = entry_path(snapshot, b, key, 0);
    Py_DECREF(key);
    return finished(snapshot, b, path, PyUnicode_FromString("was added"));
  }
  if (has_names(box->kind)) return Py_NewRef(Py_None);
  return finished(snapshot, b, box_path(snapshot, b),
                  PyUnicode_FromString("has its entries in another order"));
}

static PyObject *sequence_text(const fdp_snapshot *snapshot, Py_ssize_t b, PyObject *now)
{
  const fdp_box *box = &snapshot->boxes[b];
  Py_ssize_t size = fdp_snapshot_size(now), i = 0;
  PyObject *items, *text = NULL;
  if (size < 0) return NULL;
  if (size != box->count)
    return finished(snapshot, b, box_path(snapshot, b),
                    PyUnicode_FromFormat("had %zd entries and has %zd", box->count, size));
  items = PyList_Check(now) ? PyList_GetSlice(now, 0, size) : PySequence_List(now);
  if (items == NULL) return NULL;
  while (i < box->count && i < PyList_GET_SIZE(items) &&
         fdp_difference_same_entry(box->kind, &snapshot->entries[box->first + i],
                                   PyList_GET_ITEM(items, i)))
    i++;
  if (i < box->count && i < PyList_GET_SIZE(items))
    text = changed_entry(snapshot, b, box->first + i, PyList_GET_ITEM(items, i));
  else
    text = finished(snapshot, b, box_path(snapshot, b), PyUnicode_FromString("changed"));
  Py_DECREF(items);
  return text;
}

PyObject *fdp_difference_text(const fdp_snapshot *snapshot, Py_ssize_t b, PyObject *now)
{
  switch (snapshot->boxes[b].kind) {
    case FDP_BOX_MODULE:
    case FDP_BOX_RECORD:
    case FDP_BOX_DICT:
    case FDP_BOX_ORDERED:
    case FDP_BOX_TENSORS:
      return dict_text(snapshot, b, now);
    default:
      return sequence_text(snapshot, b, now);
  }
}

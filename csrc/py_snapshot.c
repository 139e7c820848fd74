/* Snapshot: see py_snapshot.h. Here: the type, and what a value says of itself. */
#include "py_snapshot.h"

long long fdp_snapshot_address(const fdp_snapshot *snapshot, PyObject *tensor)
{
  PyObject *value = PyObject_CallMethodNoArgs(tensor, snapshot->data_ptr);
  long long address = value == NULL ? -1 : PyLong_AsLongLong(value);
  Py_XDECREF(value);
  PyErr_Clear(); /* it has no memory, or none of its own */
  return address;
}

long long fdp_snapshot_version(const fdp_snapshot *snapshot, PyObject *tensor)
{
  PyObject *value = PyObject_GetAttr(tensor, snapshot->version);
  long long version = value == NULL ? -1 : PyLong_AsLongLong(value);
  Py_XDECREF(value);
  PyErr_Clear(); /* an inference tensor has no version */
  return version;
}

Py_ssize_t fdp_snapshot_size(PyObject *object)
{
  if (PyDict_Check(object)) return PyDict_GET_SIZE(object);
  if (PyList_Check(object)) return PyList_GET_SIZE(object);
  if (PyTuple_Check(object)) return PyTuple_GET_SIZE(object);
  return PyObject_Size(object);
}

/* differs() -> None, or a text about the first difference. */
static PyObject *snapshot_differs(PyObject *self, PyObject *Py_UNUSED(ignored))
{
  fdp_snapshot *snapshot = (fdp_snapshot *)self;
  if (snapshot->kept == NULL) {
    PyErr_SetString(PyExc_RuntimeError, "the snapshot was taken apart by the garbage collector");
    return NULL;
  }
  return fdp_difference_find(snapshot);
}

static int check_arguments(PyObject *arguments, PyObject *keywords)
{
  Py_ssize_t count = PyTuple_GET_SIZE(arguments);
  PyObject *records = count == 2 ? PyTuple_GET_ITEM(arguments, 1) : NULL;
  if (count < 1 || count > 2 || (keywords != NULL && PyDict_GET_SIZE(keywords) > 0) ||
      !PyTuple_Check(PyTuple_GET_ITEM(arguments, 0)) ||
      (records != NULL && !PyTuple_Check(records))) {
    PyErr_SetString(PyExc_TypeError,
                    "Snapshot takes a tuple of modules, and a tuple of classes or nothing");
    return -1;
  }
  for (Py_ssize_t i = 0; records != NULL && i < PyTuple_GET_SIZE(records); i++) {
    PyObject *record = PyTuple_GET_ITEM(records, i);
    if (PyType_Check(record)) continue;
    PyErr_Format(PyExc_TypeError, "records[%zd]: expected a class, not %.100s", i,
                 Py_TYPE(record)->tp_name);
    return -1;
  }
  return 0;
}

static PyObject *snapshot_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
  if (check_arguments(arguments, keywords) < 0) return NULL;
  PyObject *modules = PyTuple_GET_ITEM(arguments, 0);
  PyObject *records = PyTuple_GET_SIZE(arguments) == 2 ? Py_NewRef(PyTuple_GET_ITEM(arguments, 1))
                                                       : PyTuple_New(0);
  fdp_snapshot *snapshot = records == NULL ? NULL : (fdp_snapshot *)type->tp_alloc(type, 0);
  if (snapshot == NULL) goto done;
  snapshot->kept = PyList_New(0);
  snapshot->weak = PyTuple_New(PyTuple_GET_SIZE(modules));
  snapshot->data_ptr = PyUnicode_InternFromString("data_ptr");
  snapshot->version = PyUnicode_InternFromString("_version");
  if (snapshot->kept == NULL || snapshot->weak == NULL || snapshot->data_ptr == NULL ||
      snapshot->version == NULL ||
      fdp_snapshot_fill(snapshot, fdp_py_state_of((PyObject *)snapshot), modules, records) < 0)
    Py_CLEAR(snapshot);
done:
  Py_XDECREF(records);
  return (PyObject *)snapshot;
}

static int snapshot_traverse(PyObject *self, visitproc visit, void *arg)
{
  fdp_snapshot *snapshot = (fdp_snapshot *)self;
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(snapshot->kept);
  Py_VISIT(snapshot->weak);
  return 0;
}

static int snapshot_clear(PyObject *self)
{
  fdp_snapshot *snapshot = (fdp_snapshot *)self;
  Py_CLEAR(snapshot->kept);
  Py_CLEAR(snapshot->weak);
  return 0;
}

static void snapshot_dealloc(PyObject *self)
{
  PyTypeObject *type = Py_TYPE(self);
  fdp_snapshot *snapshot = (fdp_snapshot *)self;
  PyObject_GC_UnTrack(self);
  snapshot_clear(self);
  Py_XDECREF(snapshot->data_ptr);
  Py_XDECREF(snapshot->version);
  PyMem_Free(snapshot->types);
  PyMem_Free(snapshot->boxes);
  PyMem_Free(snapshot->entries);
  PyMem_Free(snapshot->tensors);
  type->tp_free(self);
  Py_DECREF(type);
}

static PyMethodDef snapshot_methods[] = {
    {"differs", snapshot_differs, METH_NOARGS,
     "differs() -> None if nothing that was seen has changed, else a text that names the first "
     "difference."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot snapshot_slots[] = {
    {Py_tp_doc, "Snapshot(modules, records=()): what the attributes of these modules hold now."},
    {Py_tp_new, snapshot_new},
    {Py_tp_dealloc, snapshot_dealloc},
    {Py_tp_traverse, snapshot_traverse},
    {Py_tp_clear, snapshot_clear},
    {Py_tp_methods, snapshot_methods},
    {0, NULL}};

static PyType_Spec snapshot_spec = {.name = "fastdp._C.Snapshot",
                                    .basicsize = sizeof(fdp_snapshot),
                                    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC |
                                             Py_TPFLAGS_IMMUTABLETYPE,
                                    .slots = snapshot_slots};

int fdp_py_snapshot_add(PyObject *module)
{
  PyObject *type = PyType_FromModuleAndSpec(module, &snapshot_spec, NULL);
  int result = type == NULL ? -1 : PyModule_AddType(module, (PyTypeObject *)type);
  Py_XDECREF(type);
  return result;
}

#include "py_awaited.h"

#include <structmember.h>

#include "py_error.h"
#include "py_gate.h"

typedef struct py_awaited {
  PyDictObject dict;
  PyObject *gate;    /* NULL: nothing to wait for */
  Py_ssize_t bucket; /* the last one that holds an entry: what comes earlier has come, then */
} py_awaited;

static int await(PyObject *self) {
  const py_awaited *awaited = (py_awaited *)self;

  return awaited->gate == NULL ? 0 : fdp_py_gate_pass(awaited->gate, awaited->bucket);
}

/* dict's own method of that name, called on `self`: waited for already. */
static PyObject *call_dict(const char *name, PyObject *self, PyObject *const *arguments,
                           Py_ssize_t count) {
  PyObject *method = PyObject_GetAttrString((PyObject *)&PyDict_Type, name);
  PyObject *stack[3] = {self}; /* no method of dict takes more than two arguments */
  PyObject *result = NULL;

  if (method == NULL) return NULL;
  if (count > 2)
    PyErr_Format(PyExc_TypeError, "%s expected at most 2 arguments, got %zd", name, count);
  else {
    for (Py_ssize_t i = 0; i < count; i++) stack[1 + i] = arguments[i];
    result = PyObject_Vectorcall(method, stack, (size_t)(1 + count), NULL);
  }
  Py_DECREF(method);
  return result;
}

static PyObject *awaited_subscript(PyObject *self, PyObject *key) {
  return await(self) < 0 ? NULL : PyDict_Type.tp_as_mapping->mp_subscript(self, key);
}

/* Not for the names: dict(self) and self | other take the values past items() unless a subclass
 * has an iterator of its own. */
static PyObject *awaited_iter(PyObject *self) {
  return await(self) < 0 ? NULL : PyDict_Type.tp_iter(self);
}

static PyObject *awaited_compare(PyObject *self, PyObject *other, int operation) {
  return await(self) < 0 ? NULL : PyDict_Type.tp_richcompare(self, other, operation);
}

static PyObject *awaited_repr(PyObject *self) {
  return await(self) < 0 ? NULL : PyDict_Type.tp_repr(self);
}

static PyObject *awaited_get(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
  return await(self) < 0 ? NULL : call_dict("get", self, arguments, count);
}

static PyObject *awaited_pop(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
  return await(self) < 0 ? NULL : call_dict("pop", self, arguments, count);
}

static PyObject *awaited_setdefault(PyObject *self, PyObject *const *arguments,
                                    Py_ssize_t count) {
  return await(self) < 0 ? NULL : call_dict("setdefault", self, arguments, count);
}

static PyObject *awaited_popitem(PyObject *self, PyObject *unused) {
  (void)unused;
  return await(self) < 0 ? NULL : call_dict("popitem", self, NULL, 0);
}

static PyObject *awaited_items(PyObject *self, PyObject *unused) {
  (void)unused;
  return await(self) < 0 ? NULL : call_dict("items", self, NULL, 0);
}

static PyObject *awaited_values(PyObject *self, PyObject *unused) {
  (void)unused;
  return await(self) < 0 ? NULL : call_dict("values", self, NULL, 0);
}

static PyObject *awaited_copy(PyObject *self, PyObject *unused) {
  PyObject *copy;

  (void)unused;
  if (await(self) < 0 || (copy = PyDict_New()) == NULL) return NULL;
  if (PyDict_Update(copy, self) < 0) Py_CLEAR(copy);
  return copy;
}

/* A copy or a pickle is a plain dictionary: the events stay here. */
static PyObject *awaited_reduce(PyObject *self, PyObject *protocol) {
  PyObject *items;

  (void)protocol;
  if (await(self) < 0 || (items = PyDict_Items(self)) == NULL) return NULL;
  return Py_BuildValue("O(N)", (PyObject *)&PyDict_Type, items);
}

static int awaited_init(PyObject *self, PyObject *arguments, PyObject *keywords) {
  py_awaited *awaited = (py_awaited *)self;
  PyObject *gate = PyTuple_GET_SIZE(arguments) == 1 ? PyTuple_GET_ITEM(arguments, 0) : NULL;
  PyObject *gate_type = PyObject_GetAttrString(PyType_GetModule(Py_TYPE(self)), "Gate");
  int result = -1;

  if (gate_type == NULL) return -1;
  if (gate == NULL || keywords != NULL || (PyObject *)Py_TYPE(gate) != gate_type) {
    PyErr_SetString(PyExc_TypeError, "AwaitedDict takes one Gate");
  } else {
    Py_XSETREF(awaited->gate, Py_NewRef(gate));
    awaited->bucket = -1;
    result = 0;
  }
  Py_DECREF(gate_type);
  return result;
}

static int awaited_traverse(PyObject *self, visitproc visit, void *arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(((py_awaited *)self)->gate);
  return PyDict_Type.tp_traverse(self, visit, arg);
}

static int awaited_clear(PyObject *self) {
  Py_CLEAR(((py_awaited *)self)->gate);
  return PyDict_Type.tp_clear(self);
}

static void awaited_dealloc(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);

  PyObject_GC_UnTrack(self);
  Py_CLEAR(((py_awaited *)self)->gate);
  PyDict_Type.tp_dealloc(self); /* frees the memory of any subclass */
  Py_DECREF(type);
}

static PyMethodDef awaited_methods[] = {
    {"get", (PyCFunction)(void *)awaited_get, METH_FASTCALL, PyDoc_STR("As dict.get.")},
    {"pop", (PyCFunction)(void *)awaited_pop, METH_FASTCALL, PyDoc_STR("As dict.pop.")},
    {"setdefault", (PyCFunction)(void *)awaited_setdefault, METH_FASTCALL,
     PyDoc_STR("As dict.setdefault.")},
    {"popitem", awaited_popitem, METH_NOARGS, PyDoc_STR("As dict.popitem.")},
    {"items", awaited_items, METH_NOARGS, PyDoc_STR("As dict.items.")},
    {"values", awaited_values, METH_NOARGS, PyDoc_STR("As dict.values.")},
    {"copy", awaited_copy, METH_NOARGS, PyDoc_STR("A plain dictionary of the same entries.")},
    {"__reduce_ex__", awaited_reduce, METH_O,
     PyDoc_STR("A copy or a pickle is a plain dictionary.")},
    {NULL, NULL, 0, NULL}};

static PyMemberDef awaited_members[] = {
    {"gate", T_OBJECT, offsetof(py_awaited, gate), READONLY, PyDoc_STR("Its Gate.")},
    {"bucket", T_PYSSIZET, offsetof(py_awaited, bucket), 0,
     PyDoc_STR("The last bucket that holds one of the values; -1: none does.")},
    {NULL, 0, 0, 0, NULL}};

static PyType_Slot awaited_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("AwaitedDict(gate, /)\n--\n\n"
                                  "A dictionary whose values are waited for when they are read.")},
    {Py_tp_init, (void *)awaited_init},
    {Py_tp_dealloc, (void *)awaited_dealloc},
    {Py_tp_traverse, (void *)awaited_traverse},
    {Py_tp_clear, (void *)awaited_clear},
    {Py_tp_iter, (void *)awaited_iter},
    {Py_tp_repr, (void *)awaited_repr},
    {Py_tp_richcompare, (void *)awaited_compare},
    {Py_mp_subscript, (void *)awaited_subscript},
    {Py_tp_methods, awaited_methods},
    {Py_tp_members, awaited_members},
    {0, NULL}};

static PyType_Spec awaited_spec = {
    .name = "fastdp._C.AwaitedDict",
    .basicsize = sizeof(py_awaited),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = awaited_slots,
};

int fdp_py_awaited_add(PyObject *module) {
  PyObject *bases = PyTuple_Pack(1, (PyObject *)&PyDict_Type);
  PyObject *type = bases == NULL ? NULL : PyType_FromModuleAndSpec(module, &awaited_spec, bases);
  int result = type == NULL ? -1 : PyModule_AddType(module, (PyTypeObject *)type);

  Py_XDECREF(type);
  Py_XDECREF(bases);
  return result;
}

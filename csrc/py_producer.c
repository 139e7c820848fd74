#include "py_producer.h"

#include <string.h>

/* The class `name` of `module` among the bases of `type`, itself included: borrowed, or NULL. A
 * NULL `module` means any. Compares names, so that neither torch nor NumPy has to be imported. */
static PyTypeObject *find_base(PyTypeObject *type, const char *module, const char *name) {
  PyObject *bases = type->tp_mro;

  if (bases == NULL) return NULL;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(bases); i++) {
    PyTypeObject *base = (PyTypeObject *)PyTuple_GET_ITEM(bases, i);
    const char *dot = strrchr(base->tp_name, '.');
    const char *own_name = dot == NULL ? base->tp_name : dot + 1;
    PyObject *base_module;
    bool same;

    if (strcmp(own_name, name) != 0) continue;
    if (module == NULL) return base;
    base_module = PyObject_GetAttrString((PyObject *)base, "__module__");
    if (base_module == NULL) PyErr_Clear();
    same = base_module != NULL && PyUnicode_Check(base_module) &&
           PyUnicode_CompareWithASCIIString(base_module, module) == 0;
    Py_XDECREF(base_module);
    if (same) return base;
  }
  return NULL;
}

/* New reference to an attribute of a type; NULL without an error when there is none. */
static PyObject *optional_attribute(PyTypeObject *type, PyObject *name) {
  PyObject *value = PyObject_GetAttr((PyObject *)type, name);

  if (value == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) PyErr_Clear();
  return value;
}

/* The table of major version 1 in the chain that the type shows, or NULL. -1 with an error set. */
static int find_table(fdp_py_state *state, PyTypeObject *type, const DLPackExchangeAPI **table) {
  PyObject *capsule = optional_attribute(type, state->names.exchange_table);
  const DLPackExchangeAPIHeader *header;

  *table = NULL;
  if (capsule == NULL) return PyErr_Occurred() ? -1 : 0;
  /* Anything else under that name (DLPack 1.2 had an integer) is left to the capsule protocol. */
  if (PyCapsule_IsValid(capsule, "dlpack_exchange_api")) {
    header = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    while (header != NULL && header->version.major != DLPACK_MAJOR_VERSION)
      header = header->prev_api;
    *table = (const DLPackExchangeAPI *)header;
  }
  Py_DECREF(capsule);
  return 0;
}

/* True if tensors of this subclass of torch.Tensor answer operators themselves: wrapper subclasses
 * (FakeTensor, DTensor, ...) have no memory of their own, yet some report an address. -1: error. */
static int has_own_dispatch(fdp_py_state *state, PyTypeObject *type, PyTypeObject *tensor) {
  PyObject *own = NULL;
  PyObject *inherited = NULL;
  int result = -1;

  own = optional_attribute(type, state->names.torch_dispatch);
  if (own == NULL && PyErr_Occurred()) goto done;
  inherited = optional_attribute(tensor, state->names.torch_dispatch);
  if (inherited == NULL && PyErr_Occurred()) goto done;
  result = own != inherited;
done:
  Py_XDECREF(own);
  Py_XDECREF(inherited);
  return result;
}

static int refuse_type(fdp_py_producer *producer, const char *refusal) {
  producer->way = FDP_PY_WAY_REFUSED;
  producer->refusal = refusal;
  return 0;
}

static int classify(fdp_py_state *state, PyTypeObject *type, fdp_py_producer *producer) {
  PyTypeObject *tensor = find_base(type, "torch", "Tensor");
  PyObject *method;

  *producer = (fdp_py_producer){.type = type, .is_torch = tensor != NULL};
  if (find_base(type, "numpy", "ndarray") != NULL) {
    if (find_base(type, NULL, "MaskedArray") != NULL)
      return refuse_type(producer, "a masked array cannot be borrowed: its mask would be lost");
    producer->way = FDP_PY_WAY_NUMPY;
    return 0;
  }
  if (tensor != NULL) {
    int dispatches = has_own_dispatch(state, type, tensor);

    if (dispatches < 0) return -1;
    if (dispatches)
      return refuse_type(producer, "a tensor subclass with its own __torch_dispatch__ cannot be "
                                   "borrowed: it has no memory of its own");
    if (find_base(type, NULL, "UninitializedTensorMixin") != NULL)
      return refuse_type(producer, "an uninitialized parameter or buffer cannot be borrowed: run "
                                   "the module once, or call initialize_parameters, first");
  }
  if (state->use_exchange_table && find_table(state, type, &producer->table) < 0) return -1;
  if (producer->table != NULL &&
      (producer->table->dltensor_from_py_object_no_sync != NULL ||
       producer->table->managed_tensor_from_py_object_no_sync != NULL)) {
    producer->way = FDP_PY_WAY_TABLE;
    if (state->stream_table == NULL && producer->table->current_work_stream != NULL)
      state->stream_table = producer->table;
    return 0;
  }
  producer->table = NULL;
  method = optional_attribute(type, state->names.dlpack);
  if (method == NULL) {
    if (PyErr_Occurred()) return -1;
    return refuse_type(producer, "expected a tensor (torch.Tensor, numpy.ndarray or any object "
                                 "with __dlpack__)");
  }
  Py_DECREF(method);
  producer->way = FDP_PY_WAY_CAPSULE;
  return 0;
}

int fdp_py_producer_find(fdp_py_state *state, PyTypeObject *type, fdp_py_producer *producer) {
  fdp_py_producer *entry;
  PyTypeObject *former;

  for (int i = 0; i < FDP_PY_PRODUCERS; i++) {
    if (state->producers[i].type == type) {
      *producer = state->producers[i];
      return 0;
    }
  }
  if (classify(state, type, producer) < 0) return -1;
  /* Classes made in a loop must not push tensors out, so what is refused is not remembered. */
  if (producer->way == FDP_PY_WAY_REFUSED) return 0;
  entry = &state->producers[state->producer_next++ % FDP_PY_PRODUCERS];
  former = entry->type;
  *entry = *producer;
  Py_INCREF(type);
  Py_XDECREF(former);
  return 0;
}

void fdp_py_producer_forget(fdp_py_state *state) {
  for (int i = 0; i < FDP_PY_PRODUCERS; i++) {
    PyTypeObject *former = state->producers[i].type;

    state->producers[i] = (fdp_py_producer){0};
    Py_XDECREF(former);
  }
  state->producer_next = 0;
  state->stream_table = NULL;
}

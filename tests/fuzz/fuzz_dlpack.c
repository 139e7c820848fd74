/* DLPack import: whatever a producer says of a tensor is taken or refused with an exception of a
 * documented type, each loan is given back exactly once, and no byte outside a tensor's memory is
 * touched. Python is embedded: producers are Python objects whose answers come from the input.
 *
 * A producer that lies about how much memory it has is trusted (SECURITY.md), so verbs run on
 * tensors that are truly there; tensors that may be anything are borrowed and described only. */
#include <Python.h>

#include <stdlib.h>
#include <string.h>

#include "../../csrc/dlpack.h"
#include "fuzz.h"

#define ARENA_BYTES 512
#define MOST_TENSORS 4

PyMODINIT_FUNC PyInit__C(void);

/* What the producers answer from, for the length of one input. */
static fuzz_bytes *answers;
static bool is_tame;
static fdp_view model; /* tame tensors are like this one */
static int32_t next_arena;
static char arenas[MOST_TENSORS][ARENA_BYTES] __attribute__((aligned(64)));
static long made_count, given_back_count;

static PyObject *module, *core_error, *producers[3];

static void fill_tensor(DLTensor *tensor) {
  fdp_view view;
  if (is_tame) {
    view = fuzz_tame_view(answers, model.dtype, model.shape, model.ndim,
                          arenas[next_arena++ % MOST_TENSORS], ARENA_BYTES);
  } else {
    view = fuzz_wild_view(answers);
  }
  size_t ndim = view.ndim > 0 && view.ndim <= FDP_MAX_DIMS ? (size_t)view.ndim : 0;
  *tensor = (DLTensor){.data = view.data, .device = {view.device.kind, view.device.ordinal},
                       .ndim = view.ndim, .dtype = {view.dtype.code, view.dtype.bits,
                                                    view.dtype.lanes}};
  if (!is_tame && fuzz_byte(answers) > 240) tensor->byte_offset = (uint64_t)fuzz_number(answers);
  if (!is_tame && fuzz_byte(answers) > 250) return; /* no shape, no strides */
  tensor->shape = malloc(ndim * sizeof *tensor->shape + 1);
  memcpy(tensor->shape, view.shape, ndim * sizeof *view.shape);
  if (!is_tame && fuzz_byte(answers) % 4 == 0) return; /* row-major */
  tensor->strides = malloc(ndim * sizeof *tensor->strides + 1);
  memcpy(tensor->strides, view.strides, ndim * sizeof *view.strides);
}

static void drop_tensor(DLTensor *tensor) {
  free(tensor->shape);
  free(tensor->strides);
  given_back_count += 1;
}

static void drop_legacy(DLManagedTensor *self) {
  drop_tensor(&self->dl_tensor);
  free(self);
}

static void drop_versioned(DLManagedTensorVersioned *self) {
  drop_tensor(&self->dl_tensor);
  free(self);
}

static void destroy_capsule(PyObject *capsule) {
  if (PyCapsule_IsValid(capsule, "dltensor")) {
    drop_legacy(PyCapsule_GetPointer(capsule, "dltensor"));
  } else if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
    drop_versioned(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
  }
}

static DLManagedTensorVersioned *make_versioned(void) {
  DLManagedTensorVersioned *made = calloc(1, sizeof *made);
  made->version = (DLPackVersion){DLPACK_MAJOR_VERSION, 0};
  if (!is_tame && fuzz_byte(answers) > 240) made->version.major = fuzz_byte(answers);
  if (fuzz_byte(answers) > 230) made->flags = fuzz_byte(answers);
  made->deleter = drop_versioned;
  fill_tensor(&made->dl_tensor);
  made_count += 1;
  return made;
}

/* capsule(versioned) -> what __dlpack__ gives */
static PyObject *capsule(PyObject *self, PyObject *versioned) {
  uint8_t kind = is_tame ? 0 : fuzz_byte(answers);
  (void)self;
  if (kind == 255) Py_RETURN_NONE;
  if (kind == 254) return PyErr_Format(PyExc_KeyError, "a producer's own error");
  if (kind == 253) return PyErr_Format(PyExc_TypeError, "a producer's own error");
  if (PyObject_IsTrue(versioned) || kind == 252) {
    return PyCapsule_New(make_versioned(), "dltensor_versioned", destroy_capsule);
  }
  DLManagedTensor *made = calloc(1, sizeof *made);
  made->deleter = drop_legacy;
  fill_tensor(&made->dl_tensor);
  made_count += 1;
  return PyCapsule_New(made, "dltensor", destroy_capsule);
}

/* device() -> what __dlpack_device__ gives */
static PyObject *device(PyObject *self, PyObject *unused) {
  uint8_t kind = is_tame ? 0 : fuzz_byte(answers);
  (void)self;
  (void)unused;
  if (kind == 255) return PyLong_FromLong(1);
  if (kind == 254) return PyErr_Format(PyExc_BufferError, "a producer's own error");
  if (kind > 240) {
    return Py_BuildValue("(LL)", (long long)fuzz_number(answers), (long long)fuzz_number(answers));
  }
  return Py_BuildValue("(ii)", 1, 0);
}

static int tensor_from_object(void *object, DLTensor *out) {
  /* Borrowed from the object: kept until the next input. */
  static DLTensor kept[8];
  static int next;
  DLTensor *place = &kept[next++ % 8];
  (void)object;
  if (!is_tame && fuzz_byte(answers) > 250) {
    PyErr_SetString(PyExc_RuntimeError, "a producer's own error");
    return -1;
  }
  free(place->shape);
  free(place->strides);
  fill_tensor(place);
  *out = *place;
  return 0;
}

static int managed_from_object(void *object, DLManagedTensorVersioned **out) {
  (void)object;
  if (!is_tame && fuzz_byte(answers) > 250) {
    PyErr_SetString(PyExc_BufferError, "a producer's own error");
    return -1;
  }
  *out = make_versioned();
  return 0;
}

static DLPackExchangeAPI tables[2] = {
    {.header = {{DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION}, NULL},
     .dltensor_from_py_object_no_sync = tensor_from_object},
    {.header = {{DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION}, NULL},
     .managed_tensor_from_py_object_no_sync = managed_from_object},
};

static PyMethodDef functions[] = {{"capsule", capsule, METH_O, NULL},
                                  {"device", device, METH_NOARGS, NULL},
                                  {NULL, NULL, 0, NULL}};

static const char classes[] =
    "class Capsules:\n"
    "  def __dlpack_device__(self): return device()\n"
    "  def __dlpack__(self, *, max_version=None, stream=None):\n"
    "    return capsule(max_version is not None)\n"
    "class Table: pass\n"
    "class Managed: pass\n"
    "Table.__dlpack_c_exchange_api__, Managed.__dlpack_c_exchange_api__ = tables\n"
    "made = Capsules(), Table(), Managed()\n";

static void start_python(void) {
  PyObject *names;
  PyImport_AppendInittab("_C", PyInit__C);
  Py_InitializeEx(0);
  names = PyDict_New();
  PyDict_SetItemString(names, "__builtins__", PyEval_GetBuiltins());
  for (PyMethodDef *function = functions; function->ml_name; ++function) {
    PyDict_SetItemString(names, function->ml_name, PyCFunction_New(function, NULL));
  }
  PyObject *both = Py_BuildValue("(NN)", PyCapsule_New(&tables[0], "dlpack_exchange_api", NULL),
                                 PyCapsule_New(&tables[1], "dlpack_exchange_api", NULL));
  PyDict_SetItemString(names, "tables", both);
  PyObject *ran = PyRun_String(classes, Py_file_input, names, names);
  module = PyImport_ImportModule("_C");
  if (!ran || !module) PyErr_Print();
  FUZZ_CHECK(ran && module);
  core_error = PyObject_GetAttrString(module, "Error");
  for (int i = 0; i < 3; ++i) {
    producers[i] = PySequence_GetItem(PyDict_GetItemString(names, "made"), i);
  }
}

static PyObject *tensors(int32_t count) {
  PyObject *tuple = PyTuple_New(count);
  for (int32_t i = 0; i < count; ++i) {
    PyTuple_SET_ITEM(tuple, i, Py_NewRef(producers[fuzz_below(answers, 3)]));
  }
  return tuple;
}

static PyObject *call_wild(void) {
  int32_t count = 1 + fuzz_below(answers, MOST_TENSORS);
  switch (fuzz_below(answers, 4)) {
    case 0: return PyObject_CallMethod(module, "borrow", "((N))", tensors(count));
    case 1: return PyObject_CallMethod(module, "borrow", "(N)", tensors(count));
    case 2: return PyObject_CallMethod(module, "describe", "(N)", tensors(count));
    default: return PyObject_CallMethod(module, "layout", "O", producers[fuzz_below(answers, 3)]);
  }
}

static PyObject *call_tame(void) {
  PyObject *one = producers[fuzz_below(answers, 3)];
  int32_t count = 1 + fuzz_below(answers, MOST_TENSORS - 1);
  switch (fuzz_below(answers, 5)) {
    case 0: return PyObject_CallMethod(module, "broadcast", "ON", one, tensors(count));
    case 1: return PyObject_CallMethod(module, "reduce", "NO", tensors(count), one);
    case 2: return PyObject_CallMethod(module, "scatter", "ONi", one, tensors(1),
                                       fuzz_below(answers, 10) - 1);
    case 3: return PyObject_CallMethod(module, "gather", "NOi", tensors(1), one,
                                       fuzz_below(answers, 10) - 1);
    default: return PyObject_CallMethod(module, "Bucket", "(N)", tensors(count));
  }
}

static void check_error(void) {
  PyObject *kinds[] = {PyExc_ValueError,  PyExc_TypeError,           PyExc_BufferError,
                       PyExc_MemoryError, PyExc_NotImplementedError, PyExc_OverflowError, NULL};
  bool is_documented = PyErr_ExceptionMatches(core_error);
  for (int i = 0; kinds[i]; ++i) is_documented |= PyErr_ExceptionMatches(kinds[i]);
  if (!is_documented) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    fprintf(stderr, "%s: %s\n", type ? ((PyTypeObject *)type)->tp_name : "no error",
            value ? PyUnicode_AsUTF8(PyObject_Str(value)) : "");
  }
  FUZZ_CHECK(is_documented);
  PyErr_Clear();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size_bytes) {
  fuzz_bytes bytes = {data, size_bytes};
  if (!module) start_python();
  answers = &bytes;
  is_tame = fuzz_byte(&bytes) % 2 == 0;
  if (is_tame) {
    model.dtype = fuzz_dtype(&bytes);
    if (fdp_dtype_bytes(model.dtype) == 0 || fdp_dtype_bytes(model.dtype) > 16) return 0;
    model.ndim = fuzz_shape(&bytes, 32, model.shape);
  }
  PyObject *result = is_tame ? call_tame() : call_wild();
  if (!result) check_error();
  Py_XDECREF(result);
  FUZZ_CHECK(!PyErr_Occurred());
  FUZZ_CHECK(made_count == given_back_count);
  return 0;
}

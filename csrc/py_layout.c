#include "py_layout.h"

#include <string.h>

#include "py_borrow.h"
#include "py_producer.h"

PyObject *fdp_py_integers(const int64_t *values, int32_t count) {
  PyObject *tuple = PyTuple_New(count);

  for (int32_t i = 0; tuple != NULL && i < count; i++) {
    PyObject *value = PyLong_FromLongLong(values[i]);

    if (value == NULL)
      Py_CLEAR(tuple);
    else
      PyTuple_SET_ITEM(tuple, i, value);
  }
  return tuple;
}

PyObject *fdp_py_borrow_all(PyObject *module, PyObject *tensors) {
  fdp_py_borrower borrower;
  fdp_py_views views = {0};
  PyObject *result = NULL;
  int64_t count_elems = 0;

  fdp_py_borrower_open(&borrower, PyModule_GetState(module));
  if (fdp_py_borrow_tuple(&borrower, tensors, FDP_PY_READ, "tensors", true, &views) < 0) goto done;
  for (int32_t i = 0; i < views.count; i++) {
    if (!__builtin_add_overflow(count_elems, fdp_view_count_elems(&views.items[i]), &count_elems))
      continue;
    PyErr_Format(PyExc_OverflowError, "tensors: more than %lld elements in all",
                 (long long)INT64_MAX);
    goto done;
  }
  result = PyLong_FromLongLong(count_elems);
done:
  fdp_py_views_drop(&views);
  fdp_py_borrower_close(&borrower);
  return result;
}

PyObject *fdp_py_layout(PyObject *module, PyObject *tensor) {
  static const fdp_py_argument argument = {"tensor", -1, -1};
  fdp_py_borrower borrower;
  fdp_view view;
  PyObject *shape = NULL;
  PyObject *strides = NULL;
  PyObject *result = NULL;

  fdp_py_borrower_open(&borrower, PyModule_GetState(module));
  if (fdp_py_borrow(&borrower, tensor, FDP_PY_READ | FDP_PY_CHECK_BITS, &argument, &view) < 0)
    goto done;
  shape = fdp_py_integers(view.shape, view.ndim);
  strides = fdp_py_integers(view.strides, view.ndim);
  if (shape == NULL || strides == NULL) goto done;
  result = Py_BuildValue("(OO(iii)(ii))", shape, strides, (int)view.dtype.code,
                         (int)view.dtype.bits, (int)view.dtype.lanes, (int)view.device.kind,
                         (int)view.device.ordinal);
done:
  Py_XDECREF(strides);
  Py_XDECREF(shape);
  fdp_py_borrower_close(&borrower);
  return result;
}

/* What describe() writes before the shape and the strides. No padding: every byte is compared. */
typedef struct description {
  int32_t device_kind;
  int32_t device_ordinal;
  uint16_t dtype_lanes;
  uint8_t dtype_code;
  uint8_t dtype_bits;
  uint8_t requires_grad;
  uint8_t unused[3];
  int32_t ndim;
  int32_t unused_tail;
} description;

static_assert(sizeof(description) == 24, "description has padding");

typedef struct text {
  char *bytes;
  size_t size_bytes;
  size_t capacity_bytes;
} text;

/* Makes room for `more_bytes`. 0, or -1 with MemoryError. */
static int text_reserve(text *text, size_t more_bytes) {
  size_t wanted_bytes = text->size_bytes + more_bytes;
  char *bytes;

  if (wanted_bytes <= text->capacity_bytes) return 0;
  if (wanted_bytes < 2 * text->capacity_bytes) wanted_bytes = 2 * text->capacity_bytes;
  bytes = PyMem_Realloc(text->bytes, wanted_bytes);
  if (bytes == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  text->bytes = bytes;
  text->capacity_bytes = wanted_bytes;
  return 0;
}

static void text_add(text *text, const void *bytes, size_t size_bytes) {
  memcpy(text->bytes + text->size_bytes, bytes, size_bytes);
  text->size_bytes += size_bytes;
}

/* tensor.requires_grad; false for what is no torch tensor. -1 with an error set. */
static int read_requires_grad(fdp_py_state *state, PyObject *tensor) {
  fdp_py_producer producer;
  PyObject *value;
  int result;

  if (fdp_py_producer_find(state, Py_TYPE(tensor), &producer) < 0) return -1;
  if (!producer.is_torch) return 0;
  value = PyObject_GetAttr(tensor, state->names.requires_grad);
  if (value == NULL) return -1;
  result = value == Py_True;
  Py_DECREF(value);
  return result;
}

PyObject *fdp_py_describe(PyObject *module, PyObject *tensors) {
  fdp_py_borrower borrower;
  text text = {0};
  PyObject *result = NULL;

  fdp_py_borrower_open(&borrower, PyModule_GetState(module));
  if (!PyTuple_Check(tensors)) {
    PyErr_Format(PyExc_TypeError, "tensors: expected a tuple, got %.200s",
                 Py_TYPE(tensors)->tp_name);
    goto done;
  }
  if (text_reserve(&text, (size_t)PyTuple_GET_SIZE(tensors) * 96 + 1) < 0) goto done;
  for (int32_t i = 0; i < PyTuple_GET_SIZE(tensors); i++) {
    fdp_py_argument argument = {"tensors", i, -1};
    PyObject *tensor = PyTuple_GET_ITEM(tensors, i);
    description head = {0};
    fdp_view view;
    size_t sizes_bytes;
    int requires_grad;

    if (fdp_py_borrow(&borrower, tensor, FDP_PY_READ, &argument, &view) < 0) goto done;
    requires_grad = read_requires_grad(borrower.state, tensor);
    if (requires_grad < 0) goto done;
    head.device_kind = view.device.kind;
    head.device_ordinal = view.device.ordinal;
    head.dtype_lanes = view.dtype.lanes;
    head.dtype_code = view.dtype.code;
    head.dtype_bits = view.dtype.bits;
    head.requires_grad = (uint8_t)requires_grad;
    head.ndim = view.ndim;
    sizes_bytes = (size_t)view.ndim * sizeof view.shape[0];
    if (text_reserve(&text, sizeof head + 2 * sizes_bytes) < 0) goto done;
    text_add(&text, &head, sizeof head);
    text_add(&text, view.shape, sizes_bytes);
    text_add(&text, view.strides, sizes_bytes);
  }
  result = PyBytes_FromStringAndSize(text.bytes, (Py_ssize_t)text.size_bytes);
done:
  PyMem_Free(text.bytes);
  fdp_py_borrower_close(&borrower);
  return result;
}

/* fastdp._numpy: see py_numpy.h. */
#include "py_numpy.h"

#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
/* The oldest NumPy that a build runs with, whatever headers it was built with. */
#define NPY_TARGET_VERSION NPY_1_22_API_VERSION
#include <numpy/arrayobject.h>

/* DLPack's number of a NumPy dtype. False for what DLPack cannot express. */
static bool find_dtype(const PyArray_Descr *description, npy_intp item_bytes, fdp_dtype *dtype) {
  int number = description->type_num;
  uint8_t code;

  if (number == NPY_TIMEDELTA) return false; /* counts as a signed integer below */
  if (PyTypeNum_ISBOOL(number))
    code = FDP_CODE_BOOL;
  else if (PyTypeNum_ISSIGNED(number))
    code = FDP_CODE_INT;
  else if (PyTypeNum_ISUNSIGNED(number))
    code = FDP_CODE_UINT;
  else if (PyTypeNum_ISFLOAT(number))
    code = FDP_CODE_FLOAT;
  else if (PyTypeNum_ISCOMPLEX(number))
    code = FDP_CODE_COMPLEX;
  else
    return false;
  if (item_bytes > 16) return false; /* clongdouble: 256 bits do not fit DLPack's byte */
  *dtype = (fdp_dtype){code, (uint8_t)(item_bytes * 8), 1};
  return true;
}

static int borrow(PyObject *object, fdp_view *view, bool *read_only, PyObject **refusal) {
  PyArrayObject *array = (PyArrayObject *)object;
  PyArray_Descr *description;
  npy_intp item_bytes;

  if (!PyArray_Check(object)) { /* a class of that name, and no array */
    *refusal = PyUnicode_FromFormat("%s is no numpy.ndarray", Py_TYPE(object)->tp_name);
    return *refusal != NULL ? 1 : -1;
  }
  description = PyArray_DESCR(array);
  item_bytes = PyArray_ITEMSIZE(array);
  if (!find_dtype(description, item_bytes, &view->dtype)) {
    *refusal = PyUnicode_FromFormat("arrays of dtype %S cannot be borrowed", description);
    return *refusal != NULL ? 1 : -1;
  }
  if (!PyArray_ISNOTSWAPPED(array)) {
    *refusal = PyUnicode_FromString("the array is byte-swapped: use astype(dtype.newbyteorder())");
    return *refusal != NULL ? 1 : -1;
  }
  view->data = PyArray_DATA(array);
  view->device = (fdp_device_id){FDP_DEVICE_HOST, 0};
  view->ndim = PyArray_NDIM(array); /* NPY_MAXDIMS is at most FDP_MAX_DIMS */
  for (int i = 0; i < view->ndim; i++) {
    npy_intp stride_bytes = PyArray_STRIDE(array, i);

    if (stride_bytes % item_bytes != 0) {
      *refusal = PyUnicode_FromFormat("stride of %zd bytes in dimension %d, must be a multiple of "
                                      "the element size of %zd bytes",
                                      (Py_ssize_t)stride_bytes, i, (Py_ssize_t)item_bytes);
      return *refusal != NULL ? 1 : -1;
    }
    view->shape[i] = PyArray_DIM(array, i);
    view->strides[i] = stride_bytes / item_bytes;
  }
  *read_only = !PyArray_ISWRITEABLE(array);
  return 0;
}

static int numpy_exec(PyObject *module) {
  PyObject *capsule;
  int result;

  if (PyArray_ImportNumPyAPI() < 0) return -1;
  capsule = PyCapsule_New((void *)borrow, FDP_PY_NUMPY_CAPSULE, NULL);
  if (capsule == NULL) return -1;
  result = PyModule_AddObjectRef(module, FDP_PY_NUMPY_ATTRIBUTE, capsule);
  Py_DECREF(capsule);
  return result;
}

static PyModuleDef_Slot numpy_slots[] = {
    {Py_mod_exec, (void *)numpy_exec}, FDP_PY_SLOT_INTERPRETERS FDP_PY_SLOT_GIL {0, NULL}};

static struct PyModuleDef numpy_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = FDP_PY_NUMPY_MODULE,
    .m_doc = "The NumPy border of fastdp._C, imported at the first NumPy argument.",
    .m_size = 0,
    .m_slots = numpy_slots,
};

PyMODINIT_FUNC PyInit__numpy(void) { return PyModuleDef_Init(&numpy_definition); }

#include "py_torch.h"

int fdp_py_torch_check_kind(PyObject *tensor, const fdp_py_argument *argument) {
  static const struct {
    const char *attribute, *kind;
  } kinds[] = {{"is_nested", "a nested tensor"},
               {"is_sparse", "a sparse tensor"},
               {"is_sparse_csr", "a sparse tensor"},
               {"is_quantized", "a quantized tensor"},
               {"is_meta", "a tensor on the meta device"},
               {"is_mkldnn", "an MKLDNN tensor"}};

  for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
    PyObject *flag = PyObject_GetAttrString(tensor, kinds[i].attribute);
    bool is_set = flag == Py_True;

    if (flag == NULL) return -1;
    Py_DECREF(flag);
    if (is_set)
      return fdp_py_refuse(PyExc_TypeError, argument, "%s cannot be borrowed", kinds[i].kind);
  }
  return 0;
}

/* True if the method `name` answers True; -1 with an error set. */
static int ask(PyObject *tensor, PyObject *name) {
  PyObject *answer = PyObject_CallMethodNoArgs(tensor, name);
  int result;

  if (answer == NULL) return -1;
  result = answer == Py_True;
  Py_DECREF(answer);
  return result;
}

int fdp_py_torch_check_bits(const fdp_py_names *names, PyObject *tensor, bool is_complex,
                            const fdp_py_argument *argument) {
  int is_set;

  if (is_complex) {
    is_set = ask(tensor, names->is_conj);
    if (is_set < 0) return -1;
    if (is_set)
      return fdp_py_refuse(PyExc_ValueError, argument,
                           "the conjugate bit is set: call resolve_conj() first");
  }
  is_set = ask(tensor, names->is_neg);
  if (is_set < 0) return -1;
  if (is_set)
    return fdp_py_refuse(PyExc_ValueError, argument,
                         "the negative bit is set: call resolve_neg() first");
  return 0;
}

/* Whether a tensor has the layout, and no bit set; -1 with an error set. */
static int is_plain(const fdp_py_names *names, PyObject *tensor, PyObject *strided,
                    bool is_complex) {
  PyObject *layout = PyObject_GetAttr(tensor, names->layout);
  bool is_strided = layout == strided;
  int is_set = 0;

  if (layout == NULL) return -1;
  Py_DECREF(layout);
  if (!is_strided) return 0;
  if (is_complex) is_set = ask(tensor, names->is_conj);
  if (is_set == 0) is_set = ask(tensor, names->is_neg);
  return is_set < 0 ? -1 : !is_set;
}

PyObject *fdp_py_are_plain(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
  fdp_py_state *state = PyModule_GetState(module);
  int is_complex, plain = 1;

  if (fdp_py_expect_count("are_plain", count, 3) < 0) return NULL;
  if (!PyTuple_Check(arguments[0])) {
    PyErr_Format(PyExc_TypeError, "tensors: expected a tuple, got %.200s",
                 Py_TYPE(arguments[0])->tp_name);
    return NULL;
  }
  is_complex = PyObject_IsTrue(arguments[2]);
  if (is_complex < 0) return NULL;
  for (Py_ssize_t i = 0; plain == 1 && i < PyTuple_GET_SIZE(arguments[0]); i++) {
    PyObject *tensor = PyTuple_GET_ITEM(arguments[0], i);

    if (tensor != Py_None) plain = is_plain(&state->names, tensor, arguments[1], is_complex);
  }
  return plain < 0 ? NULL : PyBool_FromLong(plain);
}

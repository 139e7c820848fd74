/* fastdp._C: the module object, its state, and the functions that are about the build and the
 * process instead of tensors. Importing opens nothing: no device, no thread, no CUDA call. */
#include "py_state.h"

#include <unistd.h>

#include "build_info.h"
#include "counters.h"
#include "deadline.h"
#include "env.h"
#include "fault.h"
#include "py_array.h"
#include "py_bucket.h"
#include "py_error.h"
#include "py_handoff.h"
#include "py_layout.h"
#include "py_log.h"
#include "py_producer.h"
#include "py_recorder.h"
#include "py_scratch.h"
#include "py_slots.h"
#include "py_snapshot.h"
#include "py_stream.h"
#include "py_torch.h"
#include "py_transport.h"
#include "py_tree.h"
#include "py_verbs.h"

/* The context is the process's, not the module object's, and the one thing here that outlives the
 * module: exported arrays may be freed after it, and closing a device that hangs would hang the
 * exit. So it is never closed. A forked child has none of the parent's threads and may have copied
 * a locked mutex: it starts a context of its own and forgets the parent's. */
fdp_context *fdp_py_context(fdp_py_state *state) {
  static fdp_context *process_context; /* guarded by the GIL, as is its owner's number */
  static pid_t process;
  fdp_context *context = NULL;
  fdp_status status;

  if (process_context != NULL && process == getpid()) return process_context;
  if (fdp_py_log_open(state) < 0 || fdp_py_recorder_open(state) < 0) return NULL;
  status = fdp_context_open(&context);
  if (status != FDP_OK) {
    fdp_py_raise(state, status);
    return NULL;
  }
  process_context = context;
  process = getpid();
  return context;
}

static PyObject *build_info(PyObject *module, PyObject *unused) {
  (void)module;
  (void)unused;
  return Py_BuildValue("{s:s,s:O,s:s,s:s,s:s,s:s,s:s}", "version", FDP_BUILD_VERSION, "cuda",
                       FDP_BUILD_CUDA ? Py_True : Py_False, "cuda_toolkit",
                       FDP_BUILD_CUDA_TOOLKIT, "cuda_archs", FDP_BUILD_CUDA_ARCHS, "compiler",
                       FDP_BUILD_COMPILER, "commit", FDP_BUILD_COMMIT, "dlpack",
                       FDP_BUILD_DLPACK);
}

static PyObject *nothing(PyObject *module, PyObject *unused) {
  (void)module;
  (void)unused;
  Py_RETURN_NONE;
}

static PyObject *env_table(PyObject *module, PyObject *unused) {
  PyObject *table = PyTuple_New(FDP_ENV_COUNT);

  (void)module;
  (void)unused;
  for (int i = 0; table != NULL && i < FDP_ENV_COUNT; i++) {
    const fdp_env_variable *variable = fdp_env_describe((fdp_env_id)i);
    PyObject *row = Py_BuildValue("(ssss)", variable->name, variable->type_text,
                                  variable->standard, variable->sentence);

    if (row == NULL)
      Py_CLEAR(table);
    else
      PyTuple_SET_ITEM(table, i, row);
  }
  return table;
}

static PyObject *counters(PyObject *module, PyObject *unused) {
  PyObject *result = PyDict_New();

  (void)module;
  (void)unused;
  for (int i = 0; result != NULL && i < FDP_VERB_COUNT; i++) {
    fdp_verb_counters verb = fdp_counters_read((fdp_verb)i);
    PyObject *entry =
        Py_BuildValue("{s:L,s:L,s:L}", "calls", (long long)verb.calls, "bytes",
                      (long long)verb.bytes, "chunks", (long long)verb.chunks);

    if (entry == NULL || PyDict_SetItemString(result, fdp_verb_name((fdp_verb)i), entry) < 0)
      Py_CLEAR(result);
    Py_XDECREF(entry);
  }
  return result;
}

static PyObject *reset_counters(PyObject *module, PyObject *unused) {
  (void)module;
  (void)unused;
  fdp_counters_reset();
  Py_RETURN_NONE;
}

static PyObject *arm_fault(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
  const char *name;
  long long nth_call;

  (void)module;
  if (fdp_py_expect_count("arm_fault", count, 2) < 0) return NULL;
  name = PyUnicode_AsUTF8(arguments[0]);
  if (name == NULL) return NULL;
  nth_call = PyLong_AsLongLong(arguments[1]);
  if (nth_call == -1 && PyErr_Occurred()) return NULL;
  if (nth_call < 0) {
    PyErr_Format(PyExc_ValueError, "nth_call: %lld, must be 0 or more", nth_call);
    return NULL;
  }
  for (int i = 0; i < FDP_FAULT_POINT_COUNT; i++) {
    if (strcmp(name, fdp_fault_name((fdp_fault_point)i)) == 0) {
      fdp_fault_arm((fdp_fault_point)i, nth_call);
      Py_RETURN_NONE;
    }
  }
  PyErr_Format(PyExc_ValueError, "point: '%s' is no fault point (fault.h)", name);
  return NULL;
}

static PyObject *set_deadline(PyObject *module, PyObject *value) {
  long long timeout_ms = PyLong_AsLongLong(value);

  (void)module;
  if (timeout_ms == -1 && PyErr_Occurred()) return NULL;
  if (timeout_ms < 0) {
    PyErr_Format(PyExc_ValueError, "timeout_ms: %lld, must be 0 or more", timeout_ms);
    return NULL;
  }
  return PyLong_FromLongLong(fdp_deadline_exchange(timeout_ms));
}

/* Tests: what a torch without the exchange table meets. Gives the former setting. */
static PyObject *use_exchange_table(PyObject *module, PyObject *value) {
  fdp_py_state *state = PyModule_GetState(module);
  int is_true = PyObject_IsTrue(value);
  bool former = state->use_exchange_table;

  if (is_true < 0) return NULL;
  state->use_exchange_table = is_true > 0;
  fdp_py_producer_forget(state);
  return PyBool_FromLong(former);
}

static PyMethodDef module_methods[] = {
    {"build_info", build_info, METH_NOARGS,
     PyDoc_STR("build_info()\n--\n\n"
               "How this extension was built: version, commit, compiler, dlpack, cuda (bool),\n"
               "cuda_toolkit and cuda_archs, as a dictionary.")},
    {"nothing", nothing, METH_NOARGS, PyDoc_STR("Does nothing: the cost of a call.")},
    {"env_table", env_table, METH_NOARGS,
     PyDoc_STR("(name, type, default, sentence) of every environment variable.")},
    {"counters", counters, METH_NOARGS, PyDoc_STR("Calls, bytes and chunks of each verb.")},
    {"reset_counters", reset_counters, METH_NOARGS, PyDoc_STR("Sets all counters to 0.")},
    {"dump", fdp_py_recorder_dump, METH_NOARGS,
     PyDoc_STR("dump()\n--\n\nThe last operations, as text.")},
    {"arm_fault", (PyCFunction)(void *)arm_fault, METH_FASTCALL,
     PyDoc_STR("arm_fault(point, nth_call, /)\n--\n\nTests: the n-th call from now fails.")},
    {"set_deadline", set_deadline, METH_O,
     PyDoc_STR("set_deadline(timeout_ms, /)\n--\n\nOf this thread's waits; gives the former.")},
    {"scatter", (PyCFunction)(void *)fdp_py_scatter, METH_FASTCALL,
     PyDoc_STR("scatter(source, targets, dim, source_stream=None, /)\n--\n\n"
               "Slices of source into the targets.")},
    {"gather", (PyCFunction)(void *)fdp_py_gather, METH_FASTCALL,
     PyDoc_STR("gather(sources, target, dim, /)\n--\n\nThe sources, one after another.")},
    {"broadcast", (PyCFunction)(void *)fdp_py_broadcast, METH_FASTCALL,
     PyDoc_STR("broadcast(source, targets, /)\n--\n\nCopies source into every target.")},
    {"reduce", (PyCFunction)(void *)fdp_py_reduce, METH_FASTCALL,
     PyDoc_STR("reduce(sources, target, /)\n--\n\nThe sum of the sources, in order.")},
    {"borrow", fdp_py_borrow_all, METH_O,
     PyDoc_STR("borrow(tensors, /)\n--\n\nBorrows each; the number of elements in all.")},
    {"describe", fdp_py_describe, METH_O,
     PyDoc_STR("describe(tensors, /)\n--\n\nWhat the tensors look like, as one string.")},
    {"are_plain", (PyCFunction)(void *)fdp_py_are_plain, METH_FASTCALL,
     PyDoc_STR("are_plain(tensors, strided, is_complex, /)\n--\n\nWhether memory says it all.")},
    {"become", (PyCFunction)(void *)fdp_py_become, METH_FASTCALL,
     PyDoc_STR("become(tensors, kinds, /)\n--\n\nGives each tensor its class, or lets it be.")},
    {"aliases", (PyCFunction)(void *)fdp_py_aliases, METH_FASTCALL,
     PyDoc_STR("aliases(tensors, kind, otherwise, /)\n--\n\nEach tensor under a new name.")},
    {"layout", fdp_py_layout, METH_O,
     PyDoc_STR("layout(tensor, /)\n--\n\n(shape, strides, dtype, device) by DLPack's numbers.")},
    {"transport", (PyCFunction)(void *)fdp_py_transport, METH_FASTCALL,
     PyDoc_STR("transport(devices, wanted, /)\n--\n\n(name, reason) of what joins them.")},
    {"open_stream", fdp_py_open_stream, METH_O,
     PyDoc_STR("open_stream(device, /)\n--\n\nThe handle of a new stream, for good.")},
    {"scratch", fdp_py_scratch, METH_O,
     PyDoc_STR("scratch(trim, /)\n--\n\nWhat the scratch pools hold, by device.")},
    {"_use_exchange_table", use_exchange_table, METH_O,
     PyDoc_STR("Tests: whether exchange tables are looked for.")},
    {NULL, NULL, 0, NULL}};

static int intern(PyObject **slot, const char *text) {
  *slot = PyUnicode_InternFromString(text);
  return *slot == NULL ? -1 : 0;
}

static int make_names(fdp_py_state *state) {
  fdp_py_names *names = &state->names;

  if (intern(&names->as_strided_in_place, "as_strided_") < 0 ||
      intern(&names->class_, "__class__") < 0 ||
      intern(&names->unsafe_split, "unsafe_split_with_sizes") < 0 ||
      intern(&names->copy, "copy") < 0 || intern(&names->detach, "detach") < 0 ||
      intern(&names->dl_device, "dl_device") < 0 || intern(&names->dlpack, "__dlpack__") < 0 ||
      intern(&names->dlpack_device, "__dlpack_device__") < 0 ||
      intern(&names->exchange_table, "__dlpack_c_exchange_api__") < 0 ||
      intern(&names->is_conj, "is_conj") < 0 || intern(&names->is_neg, "is_neg") < 0 ||
      intern(&names->layout, "layout") < 0 ||
      intern(&names->max_version, "max_version") < 0 ||
      intern(&names->requires_grad, "requires_grad") < 0 ||
      intern(&names->stream, "stream") < 0 ||
      intern(&names->torch_dispatch, "__torch_dispatch__") < 0)
    return -1;
  state->max_version = Py_BuildValue("(ii)", DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION);
  state->keywords_version = PyTuple_Pack(1, names->max_version);
  state->keywords_version_stream = PyTuple_Pack(2, names->max_version, names->stream);
  state->keywords_stream = PyTuple_Pack(1, names->stream);
  return state->max_version == NULL || state->keywords_version == NULL ||
                 state->keywords_version_stream == NULL || state->keywords_stream == NULL
             ? -1
             : 0;
}

/* threading.main_thread().ident: the importing thread need not be the main one. */
static int find_main_thread(fdp_py_state *state) {
  PyObject *module = PyImport_ImportModule("threading");
  PyObject *thread = NULL;
  PyObject *identity = NULL;
  int result = -1;

  if (module == NULL) goto done;
  thread = PyObject_CallMethod(module, "main_thread", NULL);
  if (thread == NULL) goto done;
  identity = PyObject_GetAttrString(thread, "ident");
  if (identity == NULL) goto done;
  state->main_thread = PyLong_AsUnsignedLong(identity);
  result = PyErr_Occurred() ? -1 : 0;
done:
  Py_XDECREF(identity);
  Py_XDECREF(thread);
  Py_XDECREF(module);
  return result;
}

static int module_exec(PyObject *module) {
  fdp_py_state *state = PyModule_GetState(module);

  state->use_exchange_table = true;
  if (make_names(state) < 0 || find_main_thread(state) < 0) return -1;
  if (fdp_py_error_add(module) < 0) return -1;
  if (fdp_py_bucket_add(module) < 0) return -1;
  if (fdp_py_array_add(module) < 0) return -1;
  if (fdp_py_handoff_add(module) < 0) return -1;
  if (fdp_py_snapshot_add(module) < 0) return -1;
  return fdp_py_tree_add(module);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
  fdp_py_state *state = PyModule_GetState(module);

  Py_VISIT(state->error);
  Py_VISIT(state->device_error);
  Py_VISIT(state->timeout_error);
  Py_VISIT(state->aborted_error);
  Py_VISIT(state->fault_injected);
  Py_VISIT(state->array_type);
  Py_VISIT(state->bucket_type);
  Py_VISIT(state->handoff_type);
  for (int i = 0; i < FDP_PY_PRODUCERS; i++) Py_VISIT(state->producers[i].type);
  return 0;
}

static int module_clear(PyObject *module) {
  fdp_py_state *state = PyModule_GetState(module);
  PyObject **names = (PyObject **)&state->names;

  for (size_t i = 0; i < sizeof state->names / sizeof *names; i++) Py_CLEAR(names[i]);
  Py_CLEAR(state->max_version);
  Py_CLEAR(state->keywords_version);
  Py_CLEAR(state->keywords_version_stream);
  Py_CLEAR(state->keywords_stream);
  fdp_py_producer_forget(state);
  Py_CLEAR(state->error);
  Py_CLEAR(state->device_error);
  Py_CLEAR(state->timeout_error);
  Py_CLEAR(state->aborted_error);
  Py_CLEAR(state->fault_injected);
  Py_CLEAR(state->array_type);
  Py_CLEAR(state->bucket_type);
  Py_CLEAR(state->handoff_type);
  return 0;
}

static void module_free(void *module) { module_clear(module); }

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, (void *)module_exec}, FDP_PY_SLOT_INTERPRETERS FDP_PY_SLOT_GIL {0, NULL}};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "fastdp._C",
    .m_doc = "The compiled core of fastdp; its functions are described in _C.pyi.",
    .m_size = sizeof(fdp_py_state),
    .m_methods = module_methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__C(void) { return PyModuleDef_Init(&module_definition); }

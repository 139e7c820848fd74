/* What the extension module keeps between calls: one struct for each module object, reached from
 * the module or from a type of it (only the context is the process's). Its objects are owned by
 * the module (traverse and clear are in py_module.c). Read and written with the GIL held. */
#ifndef FDP_PY_STATE_H
#define FDP_PY_STATE_H

#include "py_compat.h"

#include <stdbool.h>

#include "context.h"
#include "dlpack.h"
#include "py_numpy.h"

/* How the tensors of one type are borrowed (py_producer.c). */
typedef enum fdp_py_way {
  FDP_PY_WAY_TABLE,   /* the exchange table on the type */
  FDP_PY_WAY_CAPSULE, /* __dlpack__ */
  FDP_PY_WAY_NUMPY,   /* NumPy's C API, through fastdp._numpy */
  FDP_PY_WAY_REFUSED  /* never: `refusal` says why */
} fdp_py_way;

typedef struct fdp_py_producer {
  PyTypeObject *type; /* strong, so that its address cannot come to mean another type */
  fdp_py_way way;
  bool is_torch;                  /* has is_conj, is_neg, requires_grad, detach */
  const DLPackExchangeAPI *table; /* static for the life of the process, as DLPack promises */
  const char *refusal;
} fdp_py_producer;

/* Exact types remembered at once: torch.Tensor and Parameter, and room for a few others. */
#define FDP_PY_PRODUCERS 8

/* Interned attribute and keyword names. */
typedef struct fdp_py_names {
  PyObject *as_strided_in_place, *class_, *copy, *detach, *dl_device, *dlpack, *dlpack_device,
      *exchange_table, *is_conj, *is_neg, *layout, *max_version, *requires_grad, *stream,
      *torch_dispatch, *unsafe_split;
} fdp_py_names;

typedef struct fdp_py_state {
  PyObject *error, *device_error, *timeout_error, *aborted_error, *fault_injected;
  PyTypeObject *array_type, *bucket_type, *handoff_type;
  fdp_py_names names;
  PyObject *max_version;             /* the tuple (1, 3) */
  PyObject *keywords_version;        /* ("max_version",) */
  PyObject *keywords_version_stream; /* ("max_version", "stream") */
  PyObject *keywords_stream;         /* ("stream",) */

  fdp_py_producer producers[FDP_PY_PRODUCERS];
  uint32_t producer_next; /* the entry that the next new type replaces */
  bool use_exchange_table;
  const DLPackExchangeAPI *stream_table; /* the first table seen that can tell streams, or NULL */
  fdp_py_numpy_borrow numpy_borrow;      /* NULL until the first NumPy argument */

  unsigned long main_thread; /* identity of the interpreter's main thread */
} fdp_py_state;

/* The context of this process, opened at the first call. NULL with an error set. */
fdp_context *fdp_py_context(fdp_py_state *state);

/* The state behind an object of one of the module's own types (none can be subclassed). */
static inline fdp_py_state *fdp_py_state_of(PyObject *self) {
  return (fdp_py_state *)PyType_GetModuleState(Py_TYPE(self));
}

#endif

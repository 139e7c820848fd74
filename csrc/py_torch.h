/* What DLPack cannot tell of a torch tensor, asked of the tensor itself by its public methods.
 * torch is neither linked nor imported for it. Needs the GIL; touches no stream. */
#ifndef FDP_PY_TORCH_H
#define FDP_PY_TORCH_H

#include "py_error.h"
#include "py_state.h"

/* Refuses a kind of tensor that has no strided memory (sparse, nested, meta, ...). 0 when it is
 * none of those; -1 with an error set. */
int fdp_py_torch_check_kind(PyObject *tensor, const fdp_py_argument *argument);

/* Refuses the conjugate bit and the negative bit; `is_complex` false skips the former, which only
 * complex tensors can have. 0, or -1 with an error set. */
int fdp_py_torch_check_bits(const fdp_py_names *names, PyObject *tensor, bool is_complex,
                            const fdp_py_argument *argument);

/* A METH_FASTCALL function; _C.pyi has its arguments. */
PyObject *fdp_py_are_plain(PyObject *module, PyObject *const *arguments, Py_ssize_t count);

#endif

/* Borrowing the tensors of one call: views for the core, and what has to be given back afterwards.
 * A view is good until fdp_py_borrower_close, as long as the caller holds the objects: whoever
 * calls a function holds its arguments, and tuples cannot change, so nothing else is kept. Shapes
 * and strides are copied at once. Needs the GIL; the core may use the views without it. */
#ifndef FDP_PY_BORROW_H
#define FDP_PY_BORROW_H

#include "py_capsule.h"
#include "py_error.h"
#include "py_state.h"

/* Tensors in one tuple. Far above any model; keeps all counts inside 32 bits. */
#define FDP_PY_MAX_TENSORS (1 << 20)

typedef enum fdp_py_intent {
  FDP_PY_READ = 0,
  FDP_PY_WRITE = 1,
  /* Ask torch for the conjugate and the negative bit, which the exchange table cannot tell: for
   * tensors that come from users. Without it only complex ones are asked (a negative bit on a real
   * tensor occurs on views of complex ones only). Two calls of 60 ns a tensor. */
  FDP_PY_CHECK_BITS = 2
} fdp_py_intent;

typedef struct fdp_py_device_stream {
  fdp_device_id device;
  fdp_stream *stream;
} fdp_py_device_stream;

typedef struct fdp_py_borrower {
  fdp_py_state *state;
  fdp_py_loan *loans; /* capsules only: empty in the usual case */
  int32_t loan_count, loan_capacity;
  int32_t stream_count; /* streams asked for so far, one for each device */
  fdp_py_device_stream streams[FDP_MAX_REPLICAS];
} fdp_py_borrower;

/* The views of a tuple; released with fdp_py_views_drop. */
typedef struct fdp_py_views {
  fdp_view *items;
  fdp_stream **streams; /* of each item; NULL unless asked for */
  int32_t count;
} fdp_py_views;

void fdp_py_borrower_open(fdp_py_borrower *borrower, fdp_py_state *state);
/* Gives everything back; safe after a failure, and keeps an error that is set. */
void fdp_py_borrower_close(fdp_py_borrower *borrower);

/* One argument; `intent` is a sum of fdp_py_intent. 0, or -1 with an error that names it. */
int fdp_py_borrow(fdp_py_borrower *borrower, PyObject *object, int intent,
                  const fdp_py_argument *argument, fdp_view *view);

/* Every item of a tuple, named "<name>[i]", with its streams if `with_streams`. */
int fdp_py_borrow_tuple(fdp_py_borrower *borrower, PyObject *tuple, int intent, const char *name,
                        bool with_streams, fdp_py_views *views);
void fdp_py_views_drop(fdp_py_views *views);

/* The stream that the tensor's framework works on, asked once for each device of the call. */
int fdp_py_borrow_stream(fdp_py_borrower *borrower, fdp_device_id device, fdp_stream **stream);

#endif

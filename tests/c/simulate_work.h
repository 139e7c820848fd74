/* What the model of a simulated step computes, in whole numbers that every dtype of it holds
 * exactly, so that all results are known; and the step's arrays. */
#ifndef FDP_TEST_SIMULATE_WORK_H
#define FDP_TEST_SIMULATE_WORK_H

#include "simulate.h"

/* Arrays that are whole at home and in parts on the replicas. */
typedef enum step_kind {
  STEP_INPUT,
  STEP_BUFFER,
  STEP_OUTPUT,
  STEP_ABOVE, /* the gradient of the output */
  STEP_LOSS,
  STEP_KINDS
} step_kind;

typedef struct step {
  int64_t rows_each;
  int64_t input[MAX_ROWS];
  int64_t buffer[MAX_ROWS];
  int64_t output[MAX_ROWS]; /* as it should be, as are those below */
  int64_t above[MAX_ROWS];
  int64_t loss[MAX_ROWS];
  user_array whole[STEP_KINDS];
  user_array parts[STEP_KINDS][MAX_REPLICAS];
  user_array flats[MAX_BUCKETS][MAX_REPLICAS];
  fdp_event *arrived[MAX_BUCKETS][MAX_REPLICAS];
  bool has_gradient[MAX_BUCKETS][MAX_REPLICAS][MAX_SLOTS];
  user_array gradients[MAX_BUCKETS][MAX_REPLICAS][MAX_SLOTS];
  fdp_view gradient_views[MAX_BUCKETS][MAX_REPLICAS][MAX_SLOTS];
  user_array sums[MAX_BUCKETS];
} step;

/* Values, and what comes of them. */
void step_plan(caller *own, step *now);

/* Home's rows, where they are; what is checked at once is checked by the calling thread. */
void work_fill_home(caller *own, home_place place, const fdp_view *view, const int64_t *values);
void work_check_home(caller *own, home_place place, const char *what, const fdp_view *view,
                     const int64_t *values);

/* On the replica's compute stream. */
void work_forward(caller *own, step *now, int32_t replica, int32_t bucket);
/* Takes memory for the gradients, and writes them; now and then they are slots of the sum. */
void work_backward(caller *own, step *now, int32_t replica, int32_t bucket);
void work_update(caller *own, step *now, int32_t bucket);

#endif

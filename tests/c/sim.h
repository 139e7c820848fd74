/* A simulated backend for tests. Nothing runs when it is enqueued; sim_run then runs all of it in
 * an order that a seed picks among the legal ones: streams in order, waits after their records.
 * Every operation notes the bytes it reads and writes, and a vector clock; two operations that
 * touch the same byte, one of them writing, and that no chain of streams, records and waits puts in
 * order, are a race, whatever order happened to run. So a missing wait is found for certain, not by
 * luck. One thread. */
#ifndef FDP_TEST_SIM_H
#define FDP_TEST_SIM_H

#include "../../csrc/device.h"

typedef struct sim sim;

sim *sim_open(uint64_t seed);
/* After the context that adopted the devices was closed. */
void sim_close(sim *world);

/* A device for a context to adopt, and to close. `kind` and ordinal make its id, by which
 * transports are chosen: host devices are one memory, GPUs are not. */
fdp_device *sim_device(sim *world, int32_t kind, int32_t ordinal);
fdp_stream *sim_stream(sim *world);

/* Work of a user's: reads or writes all of a view. Writing fills it with bytes `value`; reading
 * does nothing but count. */
void sim_write(fdp_stream *stream, const fdp_view *view, unsigned char value);
void sim_read(fdp_stream *stream, const fdp_view *view);

/* The n-th stream_wait for another stream that is enqueued (1 = the first) is left out; 0: none. */
void sim_leave_out_wait(sim *world, int32_t nth);
int32_t sim_wait_count(const sim *world);

/* Runs all that is enqueued. */
void sim_run(sim *world);
/* Pairs of unordered operations found so far. */
int32_t sim_race_count(const sim *world);

#endif

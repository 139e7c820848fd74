/* A simulated backend for tests: several devices of one world, none of which runs anything until
 * the world's scheduler says so, in an order that a seed and a policy pick among the legal ones:
 * streams in order, waits after their records. Every operation declares the bytes that it reads and
 * writes. Vector clocks (one entry for each stream and each host thread) say what is ordered
 * before what by streams, records, waits, queries, host waits and locks; two accesses to one byte,
 * one of them writing, that nothing puts in order are reported with both their places, whatever
 * order happened to run. So a missing wait is found for certain, not by luck.
 *
 * The devices have memory of their own: a block that is dropped is filled with NaNs and is the next
 * to be taken; what works on it afterwards, beyond its ends, or from a device that was not let in
 * by peer_reach, is reported. So is what a device still has when it is closed.
 *
 * One operating system thread. sim_threads.h has host threads under the same scheduler. */
#ifndef FDP_TEST_SIM_H
#define FDP_TEST_SIM_H

#include "../../csrc/device.h"

typedef struct sim sim;

typedef enum sim_policy {
  SIM_LATE,          /* nothing runs before somebody has to wait for it */
  SIM_EARLY,         /* everything runs as soon as it is enqueued */
  SIM_RANDOM,        /* a few operations after each that is enqueued */
  SIM_PRIORITY,      /* the same, by random priorities of the streams that change now and then */
  SIM_STARVE_STREAM, /* early, but for one stream, which runs as late as can be */
  SIM_STARVE_DEVICE, /* the same for all streams of one device */
  SIM_POLICY_COUNT
} sim_policy;

sim *sim_open(uint64_t seed);
/* After the context that adopted the devices was closed. */
void sim_close(sim *world);
/* From now on; SIM_LATE at first. A seed makes what follows the same each time. */
void sim_set_policy(sim *world, sim_policy policy, uint64_t seed);
const char *sim_policy_name(sim_policy policy);
/* A number below `bound` from the world's own sequence. */
uint64_t sim_choose(sim *world, uint64_t bound);

/* A device for a context to adopt, and to close. `kind` and ordinal make its id, by which
 * transports are chosen: host devices are one memory, GPUs are not. On a host device the NULL
 * stream runs at once, on the calling thread; on a GPU it is a stream like others. */
fdp_device *sim_device(sim *world, int32_t kind, int32_t ordinal);
/* A stream of no device in particular. */
fdp_stream *sim_stream(sim *world);
/* What NULL stands for. The legacy default stream of a GPU makes no copies that touch memory of
 * another one (csrc/lane.h, note "default streams"): they are reported. */
fdp_stream *sim_default_stream(fdp_device *device);
/* Whose memory it is that memory_take did not give, as far as those copies go. */
void sim_own(fdp_device *device, const void *begin, int64_t size_bytes);
/* `device` cannot reach memory of `peer`: peer_reach is refused. */
void sim_forbid_peer(fdp_device *device, fdp_device *peer);

/* Work of a user's: reads or writes all of a view. Writing fills it with bytes `value`; reading
 * does nothing but count. */
void sim_write(fdp_stream *stream, const fdp_view *view, unsigned char value);
void sim_read(fdp_stream *stream, const fdp_view *view);
/* Any work of a user's, which runs `run(argument)`; the views are what it touches. */
void sim_work(fdp_device *device, fdp_stream *stream, const char *what, void (*run)(void *argument),
              void *argument, const fdp_view *reads, int32_t read_count, const fdp_view *writes,
              int32_t write_count);
/* The calling thread itself reads or writes. */
void sim_host_access(sim *world, const void *begin, int64_t size_bytes, bool writes);

/* The n-th stream_wait for another stream that is enqueued (1 = the first) is left out; 0: none. */
void sim_leave_out_wait(sim *world, int32_t nth);
int32_t sim_wait_count(const sim *world);
/* The n-th call from now (1 = the next) that can fail does, once; 0: none. */
void sim_fail_call(sim *world, int64_t nth);
/* Calls that can fail, so far. Not those made while spared. */
int64_t sim_call_count(const sim *world);
bool sim_call_failed(const sim *world);
/* The GPU that makes the n-th call from now (or the next one after it that is a GPU's) finishes
 * nothing from then on: neither what that call enqueues, nor what was enqueued before and has not
 * run, nor what waits for that. Host waits for it end at their deadlines, at once. 0: none. */
void sim_stall_call(sim *world, int64_t nth);
/* The stalled GPU goes on. */
void sim_resume(sim *world);
bool sim_is_stalled(const sim *world);
/* How long the calling thread waited in vain, by the deadlines that it gave. */
int64_t sim_lost_ms(const sim *world);
/* What is called meanwhile does not fail, and no other host thread comes between. */
void sim_spare(sim *world, bool is_on);

/* A group of a set of communicators begins and ends on streams of a device. */
void sim_turn_begin(sim *world, fdp_device *device, fdp_stream *const *streams, int32_t count,
                    const void *set);
void sim_turn_end(sim *world, fdp_device *device, fdp_stream *const *streams, int32_t count,
                  const void *set);

/* Taking memory of the device fails until some of it is dropped. */
void sim_fill_device(fdp_device *device);

/* Devices that are not closed yet, and blocks of pinned memory that were not dropped. */
int32_t sim_open_count(const sim *world);

/* Runs all that is enqueued and not stalled; the calling thread has seen it to be over. */
void sim_run(sim *world);
/* The same, for every thread; and forgets it, so that a world may go on for ever. Nothing is
 * stalled. */
void sim_retire(sim *world);

/* What was wrong so far, and the text of the first. "@0x..." in it is an address of code. */
int32_t sim_race_count(const sim *world);
const char *sim_first_report(const sim *world);
void sim_report(sim *world, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* What the calling thread is at, for reports: lives for ever. */
void sim_note(sim *world, const char *text, int32_t number);
/* Keeps where every operation came from, as deep as the compiler lets it: slow. */
void sim_explain(sim *world);
/* A number that stands for all that was enqueued and run, in its order; and the same as text. */
uint64_t sim_trace_hash(const sim *world);
void sim_trace_to(sim *world, void *file);

#endif

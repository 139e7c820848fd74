/* Streams and events of the host device (device_host.h): a thread with a queue of tasks, and events
 * whose records are shared. Private to device_host.c. Any thread may call; a stream is closed by
 * one thread, after the last call that names it. */
#ifndef FDP_HOST_STREAM_H
#define FDP_HOST_STREAM_H

#include "device_host.h"

/* Runs on the stream's thread. A status other than FDP_OK fails the stream, with the message that
 * was left. */
typedef fdp_status host_task_run(fdp_stream *stream, void *arguments);

/* One enqueued operation; the arguments that it runs on follow it in the same block. */
typedef struct host_task {
  struct host_task *next;
  host_task_run *run;
  _Alignas(16) unsigned char arguments[];
} host_task;

fdp_status host_stream_open(const fdp_device_host_options *options, fdp_stream **stream);
/* Waits for the queue to run empty, at most the options' timeout; then leaves the thread to end by
 * itself. NULL is fine. */
void host_stream_close(fdp_stream *stream);

/* A task with room for `size_bytes` of arguments; host_stream_push takes it over. */
fdp_status host_task_open(host_task_run *run, size_t size_bytes, host_task **task);
void host_stream_push(fdp_stream *stream, host_task *task);
/* Only inside a task: whether an earlier one failed. */
fdp_status host_stream_status(const fdp_stream *stream);

fdp_status host_event_open(fdp_event **event);
void host_event_close(fdp_event *event);
fdp_status host_event_record(fdp_event *event, fdp_stream *stream);
/* A NULL stream waits on the calling thread, with the options' deadline and abort flag. */
fdp_status host_stream_wait(const fdp_device_host_options *options, fdp_stream *stream,
                            fdp_event *event);
/* Both fail when the recorded stream had failed. */
fdp_status host_event_query(fdp_event *event, bool *passed);
fdp_status host_event_synchronize(fdp_event *event, int64_t timeout_ms,
                                  const volatile int *abort_flag);

#endif

/* Simulated training: worlds of one to eight devices, in which one or two host threads train random
 * models over the real verbs, pools and transports, while the scheduler runs what they enqueue in
 * every order that is legal, and calls fail in between. A step of a thread is one schedule. The
 * exit status is 0 if nothing was wrong; else what was is printed, with the line that repeats it.
 *
 *   simulate [--seed N] [--worlds N] [--schedules N] [--seconds N] [--twice N]
 *            [--sweep [--stall] [--every N]] [--trace FILE] [--brief]
 *
 * --seed: of the first world; --worlds, --schedules, --seconds: when to stop, whichever is first,
 * or SIGTERM;
 * --twice: every N-th world runs a second time and must leave the same trace; --sweep: worlds of
 * one round, once for each call of a device (each N-th), which fails; --stall: from which on,
 * instead, the device never finishes anything until the round is over; --trace: what was enqueued
 * and run, as text; --brief: no stacks. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include "simulate_world.h"

enum { NO_LIMIT = 0, WORLD_SECONDS = 5 /* of the processor's time: many times what it takes */ };

typedef struct options {
  uint64_t seed;
  int64_t worlds;
  int64_t schedules;
  int64_t seconds;
  int64_t twice;
  int64_t every;
  bool sweeps;
  bool stalls;
  bool is_brief;
  const char *trace;
} options;

static const char *program;
static volatile sig_atomic_t has_to_stop;

/* --- what is printed --- */

/* Addresses of code become places. */
static void print_report(const char *report) {
  char command[600], path[400] = "";
  ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
  for (const char *at = report; *at; ++at) {
    char *end = NULL;
    unsigned long long address = strncmp(at, "@0x", 3) == 0 ? strtoull(at + 1, &end, 16) : 0;
    if (!address || length < 0) {
      fputc(*at, stderr);
      continue;
    }
    fflush(stderr);
    snprintf(command, sizeof command, "addr2line -s -f -p -e '%s' %llx >&2", path, address - 1);
    fputs("at ", stderr);
    if (system(command) != 0) fprintf(stderr, "0x%llx", address);
    at = end - 1;
  }
  fputc('\n', stderr);
}

static void print_replay(uint64_t seed, const char *rest) {
  fprintf(stderr, "replay: %s --seed %llu --worlds 1%s\n", program, (unsigned long long)seed,
          rest);
}

/* An assertion of the core, a deadlock, a world without an end (SIGVTALRM), or worse. */
static void on_signal(int number) {
  fprintf(stderr, "seed %llu: signal %d\n", (unsigned long long)world_seed(), number);
  print_replay(world_seed(), "");
  _exit(3);
}

static void on_stop(int number) {
  (void)number;
  has_to_stop = 1;
}

static bool is_wrong(const options *chosen, uint64_t seed, const world_outcome *result,
                     int64_t failing_call) {
  if (!*result->report) return false;
  world_totals ignored = {0};
  fprintf(stderr, "seed %llu", (unsigned long long)seed);
  if (failing_call > 0) {
    fprintf(stderr, ", call %lld %s", (long long)failing_call,
            chosen->stalls ? "never finishes" : "fails");
  }
  fputs(": ", stderr);
  print_report(result->report);
  print_replay(seed, !chosen->sweeps ? "" : chosen->stalls ? " --sweep --stall" : " --sweep");
  if (chosen->is_brief) return true;
  world_outcome again = world_play(seed, true, NULL, failing_call, chosen->stalls, &ignored);
  print_report(again.report);
  return true;
}

/* --- runs --- */

static bool sweep(const options *chosen, uint64_t seed, world_totals *sums) {
  world_outcome clean = world_play(seed, false, NULL, -1, chosen->stalls, sums);
  if (is_wrong(chosen, seed, &clean, -1)) return false;
  for (int64_t call = clean.first_call; call <= clean.call_count; call += chosen->every) {
    world_outcome result = world_play(seed, false, NULL, call, chosen->stalls, sums);
    if (is_wrong(chosen, seed, &result, call)) return false;
    sums->sweeps += 1;
  }
  return true;
}

static void set_deadline(void) {
  const struct itimerval limit = {.it_value = {.tv_sec = WORLD_SECONDS}};
  setitimer(ITIMER_VIRTUAL, &limit, NULL);
}

static bool play_world(const options *chosen, uint64_t seed, FILE *trace, world_totals *sums) {
  if (!chosen->sweeps) set_deadline();
  sums->worlds += 1;
  if (chosen->sweeps) return sweep(chosen, seed, sums);
  world_outcome result = world_play(seed, false, trace, 0, false, sums);
  if (is_wrong(chosen, seed, &result, 0)) return false;
  if (chosen->twice == 0 || sums->worlds % chosen->twice != 0) return true;
  world_outcome again = world_play(seed, false, NULL, 0, false, sums);
  if (again.trace_hash == result.trace_hash) return true;
  fprintf(stderr, "seed %llu: two runs left different traces\n", (unsigned long long)seed);
  print_replay(seed, "");
  return false;
}

static double seconds_now(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static int read_options(int argument_count, char **arguments, options *chosen) {
  for (int i = 1; i < argument_count; ++i) {
    const char *name = arguments[i];
    if (strcmp(name, "--sweep") == 0) { chosen->sweeps = true; continue; }
    if (strcmp(name, "--stall") == 0) { chosen->sweeps = chosen->stalls = true; continue; }
    if (strcmp(name, "--brief") == 0) { chosen->is_brief = true; continue; }
    const char *value = i + 1 < argument_count ? arguments[++i] : "";
    long long number = atoll(value);
    if (strcmp(name, "--seed") == 0) chosen->seed = strtoull(value, NULL, 10);
    else if (strcmp(name, "--worlds") == 0) chosen->worlds = number;
    else if (strcmp(name, "--schedules") == 0) chosen->schedules = number;
    else if (strcmp(name, "--seconds") == 0) chosen->seconds = number;
    else if (strcmp(name, "--twice") == 0) chosen->twice = number;
    else if (strcmp(name, "--every") == 0) chosen->every = number > 0 ? number : 1;
    else if (strcmp(name, "--trace") == 0) chosen->trace = value;
    else {
      fprintf(stderr, "unknown option %s\n", name);
      return 2;
    }
  }
  return 0;
}

static bool goes_on(const options *chosen, const world_totals *sums, double seconds) {
  if (has_to_stop) return false;
  if (chosen->worlds != NO_LIMIT && sums->worlds >= chosen->worlds) return false;
  if (chosen->schedules != NO_LIMIT && sums->schedules >= chosen->schedules) return false;
  return chosen->seconds == NO_LIMIT || seconds < (double)chosen->seconds;
}

int main(int argument_count, char **arguments) {
  options chosen = {.seed = 1, .every = 1};
  world_totals sums = {0};
  program = arguments[0];
  if (read_options(argument_count, arguments, &chosen) != 0) return 2;
  if (chosen.worlds + chosen.schedules + chosen.seconds == 0) chosen.worlds = 1;
  FILE *trace = chosen.trace ? fopen(chosen.trace, "w") : NULL;
  signal(SIGABRT, on_signal);
  signal(SIGSEGV, on_signal);
  signal(SIGVTALRM, on_signal);
  signal(SIGTERM, on_stop);
  signal(SIGINT, on_stop);
  double start = seconds_now();
  bool is_right = true;
  while (is_right && goes_on(&chosen, &sums, seconds_now() - start)) {
    is_right = play_world(&chosen, chosen.seed + (uint64_t)sums.worlds, trace, &sums);
  }
  double seconds = seconds_now() - start;
  printf("%lld schedules (%lld of them on several devices, %lld calls failed) of seeds %llu to "
         "%llu in %.1f s, %.0f a second: %s\n",
         (long long)sums.schedules, (long long)sums.several, (long long)sums.failures,
         (unsigned long long)chosen.seed,
         (unsigned long long)chosen.seed + (unsigned long long)sums.worlds - 1, seconds,
         (double)sums.schedules / seconds, is_right ? "nothing was wrong" : "WRONG");
  if (chosen.stalls) {
    printf("%lld times a device never finished from a call on; %lld steps were late\n",
           (long long)sums.sweeps, (long long)sums.late);
  } else if (chosen.sweeps) {
    printf("%lld calls were made to fail, one a run\n", (long long)sums.sweeps);
  }
  for (int32_t i = 0; i < SIM_POLICY_COUNT && !chosen.is_brief; ++i) {
    printf("  %s: %lld\n", sim_policy_name((sim_policy)i), (long long)sums.policies[i]);
  }
  if (trace) fclose(trace);
  return is_right ? 0 : 1;
}

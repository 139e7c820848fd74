/* What is said of what is wrong. */
#include <execinfo.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim_inside.h"

void sim_report(sim *world, const char *format, ...) {
  va_list arguments;
  if (world->race_count++ > 0) return;
  va_start(arguments, format);
  vsnprintf(world->report, sizeof world->report, format, arguments);
  va_end(arguments);
  if (!world->explains) return;
  for (int32_t i = 0; i < 2; ++i) { /* "[stacks 3 and 7]" */
    const char *at = strstr(world->report, "[stacks ");
    int numbers[2] = {-1, -1};
    if (!at || sscanf(at, "[stacks %d and %d]", &numbers[0], &numbers[1]) != 2) return;
    if (numbers[i] < 0) continue;
    size_t used = strlen(world->report);
    used += (size_t)snprintf(world->report + used, sizeof world->report - used, "\n  %s:",
                             i == 0 ? "the first, from" : "the second, from");
    for (int32_t k = 0; k < SIM_STACK_DEPTH && used < sizeof world->report; ++k) {
      const void *place = world->stacks[numbers[i]][k];
      if (!place) break;
      used += (size_t)snprintf(world->report + used, sizeof world->report - used, "\n    @%p",
                               place);
    }
  }
}

int32_t sim_race_count(const sim *world) { return world->race_count; }

const char *sim_first_report(const sim *world) { return world->report; }

void sim_note(sim *world, const char *text, int32_t number) {
  world->notes[world->thread] = (sim_place){.note = text, .number = number};
}

void sim_explain(sim *world) { world->explains = true; }

sim_place sim_place_of(sim *world, const char *what, const void *site) {
  const sim_place *note = &world->notes[world->thread];
  sim_place place = {what, site, -1, note->note ? note->note : "-", note->number};
  if (!world->explains) return place;
  int64_t capacity = world->stack_capacity;
  void *frames[SIM_STACK_DEPTH + 2] = {NULL};
  world->stacks = sim_grow(world->stacks, sizeof *world->stacks, world->stack_count, &capacity);
  world->stack_capacity = (int32_t)capacity;
  backtrace(frames, SIM_STACK_DEPTH + 2);
  for (int32_t k = 0; k < SIM_STACK_DEPTH; ++k) {
    world->stacks[world->stack_count][k] = frames[k + 2];
  }
  place.stack = world->stack_count++;
  return place;
}

uint64_t sim_trace_hash(const sim *world) { return world->trace_hash; }

void sim_trace_to(sim *world, void *file) { world->trace_file = file; }

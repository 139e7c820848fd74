/* The checks of a program that is one file of tests by itself, counted. The last message of the
 * core stands beside a failure. Included once, by that file. */
#ifndef FDP_TESTS_ALONE_H
#define FDP_TESTS_ALONE_H

#include <stdbool.h>
#include <stdio.h>

#include "../../csrc/status.h"

static int passed, failed;

static void check(bool ok, int line, const char *text) {
  if (ok) {
    passed++;
  } else {
    failed++;
    printf("FAILED line %d: %s (last message: %s)\n", line, text, fdp_last_message());
  }
}

#define CHECK(condition) check((condition), __LINE__, #condition)

#endif

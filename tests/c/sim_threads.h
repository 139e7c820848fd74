/* Host threads under the scheduler of a simulated world: the seed says which one goes on at each
 * call of a device, and at each lock that another holds. They are coroutines of one operating
 * system thread. A lock puts what its next holder does after what its last one did. A program that
 * links this file wraps pthread_mutex_lock and pthread_mutex_unlock. */
#ifndef FDP_TEST_SIM_THREADS_H
#define FDP_TEST_SIM_THREADS_H

#include "sim.h"

/* Runs all bodies to their end; they begin after what the caller did, and it goes on after them. */
void sim_threads_run(sim *world, void (*body)(void *argument), void *const *arguments,
                     int32_t count);
/* Lets another thread run, if the seed says so. */
void sim_yield(sim *world);

#endif

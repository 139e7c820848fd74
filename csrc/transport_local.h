/* One memory for all: host devices, or one GPU that holds several replicas. The target's stream
 * does the work and reads the sources where they are; no scratch, no staging. Keeps nothing. */
#ifndef FDP_TRANSPORT_LOCAL_H
#define FDP_TRANSPORT_LOCAL_H

#include "transport.h"

fdp_status fdp_transport_local_open(fdp_transport **transport);

#endif

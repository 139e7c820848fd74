/* Leads: the first endpoint of each device but home's, as a device may be listed several times. The
 * peer transport moves between home and the leads; the other endpoints of a device follow its lead.
 * Pure: any thread, no streams. */
#ifndef FDP_PEER_LEADS_H
#define FDP_PEER_LEADS_H

#include "transport.h"

typedef struct fdp_peer_leads {
  int32_t indices[FDP_MAX_REPLICAS];
  int32_t count;
} fdp_peer_leads;

static inline int32_t fdp_peer_lead_of(const fdp_endpoint *endpoints, int32_t index) {
  int32_t lead = 0;
  while (endpoints[lead].device != endpoints[index].device) ++lead;
  return lead;
}

static inline fdp_peer_leads fdp_peer_leads_find(const fdp_endpoint *home,
                                                 const fdp_endpoint *endpoints, int32_t count) {
  fdp_peer_leads leads = {.count = 0};
  for (int32_t i = 0; i < count; ++i) {
    bool is_lead = endpoints[i].device != home->device && fdp_peer_lead_of(endpoints, i) == i;
    if (is_lead) leads.indices[leads.count++] = i;
  }
  return leads;
}

/* Note "shards". To pull n - 1 whole buckets into home, or out of it, would make home's link the
 * bottleneck. With three or more devices a large bucket is cut into a shard for each device but
 * home, which takes part in all of that shard's traffic: so every link carries the bucket about
 * once each way. */
static inline bool fdp_peer_is_sharded(const fdp_peer_leads *leads, int64_t size_bytes) {
  return leads->count > 1 && size_bytes >= FDP_PEER_SHARDED_BYTES;
}

/* Note "chunks". Where it is not, a bucket is packed on one device and then pulled by another. A
 * large one goes in chunks: while one is pulled the next is packed. */
static inline int32_t fdp_peer_chunk_count(int64_t size_bytes) {
  int64_t count = size_bytes / FDP_PEER_CHUNK_BYTES;
  return count < 1 ? 1 : count < FDP_PEER_MAX_CHUNKS ? (int32_t)count : FDP_PEER_MAX_CHUNKS;
}

/* Note "fetched tensors" (peer_sum.c). Their chunks are smaller: a sum starts when its chunk is
 * there, and what no copy hides is the last chunk's. */
static inline int32_t fdp_peer_fetch_count(int64_t size_bytes) {
  int64_t count = (size_bytes + FDP_PEER_FETCH_CHUNK_BYTES - 1) / FDP_PEER_FETCH_CHUNK_BYTES;
  return count < FDP_PEER_FETCH_CHUNKS ? (int32_t)count : FDP_PEER_FETCH_CHUNKS;
}

#endif

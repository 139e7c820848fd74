/* Whether two devices reach each other's memory, and rightly so. An IOMMU or PCI ACS can make peer
 * copies stall, or change bytes with no error. So before a pair is first used a pattern is copied
 * both ways, in several sizes, by the copy engine and by kernels, under a deadline. The answer is
 * kept: one check per pair and process. Any thread; one mutex, held during a check. */
#ifndef FDP_PEER_CHECK_H
#define FDP_PEER_CHECK_H

#include "device.h"

typedef struct fdp_peer_book fdp_peer_book;

/* Reads FASTDP_TEST_BAD_PEER. `timeout_ms` bounds each host wait. */
fdp_status fdp_peer_book_open(int64_t timeout_ms, fdp_peer_book **book);
void fdp_peer_book_close(fdp_peer_book *book);

/* FDP_OK if the pair may be used; FDP_UNSUPPORTED, with the reason, if not. For a pair that reaches
 * but failed the check a warning goes to the log, once. The first time it enqueues on streams of
 * its own and waits on the host; nothing of the caller's is touched. Any other status is a failure
 * to find out. */
fdp_status fdp_peer_book_allows(fdp_peer_book *book, fdp_device *a, fdp_device *b);
/* The same, but a pair that does not reach is fine: FDP_UNSUPPORTED only if it failed the check. */
fdp_status fdp_peer_book_trusts(fdp_peer_book *book, fdp_device *a, fdp_device *b);

#endif

# The simulation of training steps (simulate.c), in a folder of its own:
#   make -f simulate.mk            builds it
#   make -f simulate.mk short      what `make core-test` runs
#   make -f simulate.mk long       many schedules: SCHEDULES=1000000 SEED=1
CC ?= gcc
ROOT := ../..
BUILD ?= build/sim
SCHEDULES ?= 1000000
SEED ?= 1
# As in the Makefile, and pools that give back early; buckets are small.
LIMITS := -DFDP_PEER_SHARDED_BYTES=288 -DFDP_PEER_CHUNK_BYTES=256 -DFDP_PEER_DIRECT_BYTES=320 \
          -DFDP_PEER_GATHERED_BYTES=512 -DFDP_PEER_STAY_BYTES=100 -DFDP_PEER_STAY_MEAN_BYTES=120 \
          -DFDP_PEER_FETCH_BYTES=160 -DFDP_PEER_FETCH_CHUNK_BYTES=64 -DFDP_PEER_FETCH_CHUNKS=4 \
          -DFDP_RELAY_CHUNK_BYTES=192 -DFDP_PEER_CHECK_BYTES=1024 -DFDP_POOL_IDLE_BYTES=2048 -DFDP_POOL_STALE_GIVES=16
FLAGS := -std=c11 -D_GNU_SOURCE -g -O2 -pthread -fno-pie -fno-optimize-sibling-calls $(LIMITS) \
         -Wall -Wextra -Wpedantic -Wshadow -Wconversion $(EXTRA)
CORE := $(filter-out $(wildcard $(addprefix $(ROOT)/csrc/,py_*.c *cuda*.c)), \
          $(wildcard $(ROOT)/csrc/*.c)) $(wildcard $(ROOT)/kernels/ref*.c)
TESTS := $(wildcard sim*.c) rig.c fake_gpu.c
OBJECTS := $(patsubst $(ROOT)/%.c,$(BUILD)/%.o,$(CORE)) $(TESTS:%.c=$(BUILD)/tests/%.o)
LINK := -no-pie -pthread -Wl,--wrap=pthread_mutex_lock,--wrap=pthread_mutex_unlock \
        -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc,--wrap=aligned_alloc,--wrap=free -ldl

$(BUILD)/simulate: $(OBJECTS) $(BUILD)/libfakenccl.so
	$(CC) -g $(EXTRA) $(OBJECTS) $(LINK) -o $@
$(BUILD)/%.o: $(ROOT)/%.c simulate.mk
	@mkdir -p $(@D)
	$(CC) $(FLAGS) -MMD -MP -c $< -o $@
$(BUILD)/tests/%.o: %.c simulate.mk
	@mkdir -p $(@D)
	$(CC) $(FLAGS) '-DFAKE_NCCL_PATH="$(abspath $(BUILD))/libfakenccl.so"' -MMD -MP -c $< -o $@
$(BUILD)/libfakenccl.so: fake_nccl.c fake_nccl_group.c fake_nccl.h fake_nccl_inside.h \
                         $(ROOT)/csrc/nccl.h $(ROOT)/csrc/dtype.c
	@mkdir -p $(@D)
	$(CC) $(filter-out -fno-pie,$(FLAGS)) -fPIC -shared -fvisibility=hidden $(filter %.c,$^) -o $@

# How build_tools/mutation.py compiles and links.
flags:
	@echo '$(FLAGS)'
	@echo '$(OBJECTS)'
	@echo '$(LINK)'

short: $(BUILD)/simulate
	$(BUILD)/simulate --schedules 20000 --twice 10
	$(BUILD)/simulate --sweep --every 10 --worlds 10 --seed 2000 --brief
	$(BUILD)/simulate --stall --every 25 --worlds 10 --seed 3000 --brief
	$(BUILD)/simulate --worlds 3 --brief --trace $(BUILD)/trace-1 > $(BUILD)/trace.log
	$(BUILD)/simulate --worlds 3 --brief --trace $(BUILD)/trace-2 > $(BUILD)/trace.log
	cmp $(BUILD)/trace-1 $(BUILD)/trace-2
long: $(BUILD)/simulate
	$(BUILD)/simulate --schedules $(SCHEDULES) --seed $(SEED) --twice 100
	$(BUILD)/simulate --sweep --worlds 100 --seed $(SEED) --brief
	$(BUILD)/simulate --stall --worlds 100 --seed $(SEED) --brief

-include $(OBJECTS:.o=.d)
.PHONY: flags short long
.DEFAULT_GOAL := $(BUILD)/simulate

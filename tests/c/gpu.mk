# Tests that need a GPU, each a program of its own: the kernels against plain C (test_cuda), the
# device (gpu_device), the verbs over each transport (gpu_transports) and over NCCL (gpu_nccl). With
# several GPUs they use them.
#
#   make -f gpu.mk test     all of them
#   make -f gpu.mk check    all but NCCL's under compute-sanitizer: memcheck, initcheck, synccheck
#   make -f gpu.mk python-check   Python's tests under memcheck and synccheck
#   make -f gpu.mk refusals needs no GPU: an old driver, and where there is none, none
#
# NCCL's kernels wait for each other, which a sanitizer that runs kernels one by one never ends; what
# fastdp enqueues around them is what gpu_transports runs. Without a GPU, `all` compiles everything.
PYTHON ?= python3
ARCH ?= $(if $(wildcard /dev/nvidiactl),native,sm_90)
ROOT := ../..
BUILD := build/gpu
ifndef NVCC # once, and not at every use
NVCC := $(shell $(PYTHON) $(ROOT)/build_tools/toolkit.py --nvcc)
endif
SANITIZER ?= $(firstword $(wildcard $(addsuffix compute-sanitizer,$(dir $(NVCC)) /usr/local/cuda/bin/)) \
               compute-sanitizer)
# What is refused on purpose (no memory, a peer that is open already) is no error of the run.
SANITIZE := $(SANITIZER) --error-exitcode 99 --report-api-errors no
TOOLS ?= memcheck initcheck synccheck
ifndef FASTDP_NCCL
FASTDP_NCCL := $(firstword $(wildcard $(addsuffix /libnccl.so.2,$(shell $(PYTHON) -c 'import sys; \
                 print(*(p + "/nvidia/" + d + "/lib" for p in sys.path for d in ("nccl", "cu13")))'))))
endif

PROGRAMS := gpu_device gpu_transports gpu_nccl cuda_refusals
CHECKED := test_cuda gpu_device gpu_transports
CORE := $(filter-out $(wildcard $(ROOT)/csrc/py_*.c),$(wildcard $(ROOT)/csrc/*.c))
REF := $(wildcard $(ROOT)/kernels/ref*.c)
KERNELS := $(wildcard $(ROOT)/kernels/*.cu)
OBJECTS := $(patsubst $(ROOT)/%,$(BUILD)/%.o,$(CORE) $(REF) $(KERNELS))
HEADERS := $(wildcard *.h *.cuh $(ROOT)/csrc/*.h $(ROOT)/kernels/*.h $(ROOT)/kernels/*.cuh)
# nvcc passes C on to the C compiler, with the toolkit's headers.
# Buckets of gpu_transports are no larger than a few megabytes: they go in chunks, are fetched or
# stay in place all the same.
LIMITS := -DFDP_PEER_CHUNK_BYTES=262144 -DFDP_PEER_DIRECT_BYTES=65536 -DFDP_PEER_STAY_BYTES=131072 \
          -DFDP_PEER_STAY_MEAN_BYTES=1048576 -DFDP_PEER_FETCH_BYTES=524288 \
          -DFDP_PEER_FETCH_CHUNK_BYTES=131072
CC_NVCC := $(NVCC) -x c -O2 $(LIMITS) -DFDP_WITH_CUDA -D_GNU_SOURCE -Xcompiler -std=c11,-pthread
CUDA_NVCC := $(NVCC) -std=c++17 -O2 -lineinfo -arch=$(ARCH) -DFDP_WITH_CUDA
LINK := $(NVCC) -arch=$(ARCH)
LIBRARIES := -lpthread -ldl -lrt -lm

all: $(addprefix $(BUILD)/,test_cuda $(PROGRAMS))

$(BUILD)/%.c.o: $(ROOT)/%.c $(HEADERS)
	@mkdir -p $(@D)
	@$(CC_NVCC) -c $< -o $@
$(BUILD)/%.cu.o: $(ROOT)/%.cu $(HEADERS)
	@mkdir -p $(@D)
	@$(CUDA_NVCC) -c $< -o $@
$(BUILD)/%.o: %.c $(HEADERS)
	@mkdir -p $(@D)
	@$(CC_NVCC) -c $< -o $@
$(BUILD)/test_cuda: test_cuda.cu $(OBJECTS) $(HEADERS)
	@$(CUDA_NVCC) $< $(filter $(BUILD)/kernels/%,$(OBJECTS)) $(LIBRARIES) -o $@
$(addprefix $(BUILD)/,$(PROGRAMS)): $(BUILD)/%: $(BUILD)/%.o $(BUILD)/gpu_proxy.o $(OBJECTS)
	@$(LINK) $^ $(LIBRARIES) -o $@

# Each runs, whatever became of those before it; the last line says which failed.
test: all
	@failed=; for program in $(CHECKED); do \
	  echo "== $$program"; $(BUILD)/$$program || failed="$$failed $$program"; done; \
	echo "== gpu_nccl"; \
	if [ -z "$(FASTDP_NCCL)" ]; then echo "SKIPPED: no NCCL; FASTDP_NCCL may name one"; \
	else FASTDP_NCCL="$(FASTDP_NCCL)" $(BUILD)/gpu_nccl || failed="$$failed gpu_nccl"; fi; \
	test -z "$$failed" || { echo "FAILED:$$failed"; exit 1; }

check: all
	@failed=; for tool in $(TOOLS); do for program in $(CHECKED); do \
	  echo "== $$tool $$program"; \
	  $(SANITIZE) --tool $$tool $(BUILD)/$$program short || failed="$$failed $$tool:$$program"; \
	done; done; \
	test -z "$$failed" || { echo "FAILED:$$failed"; exit 1; }; echo "No errors."

$(BUILD)/old/libcuda.so.1: old_driver.c
	@mkdir -p $(@D)
	@$(CC) -shared -fPIC -Wl,-soname,libcuda.so.1 $< -o $@

refusals: $(BUILD)/cuda_refusals $(BUILD)/old/libcuda.so.1
	@echo "== cuda_refusals"
	@LD_LIBRARY_PATH=$(BUILD)/old $(BUILD)/cuda_refusals old
	@if [ -e /dev/nvidiactl ]; then echo "there is a driver: what is said without one is not tested"; \
	else $(BUILD)/cuda_refusals none; fi

# Python's tests of GPUs, with torch's kernels in them: torch reads memory that nobody wrote (in
# padding, say), so without initcheck. PYTHON_TESTS names others; fastdp is built already.
PYTHON_TESTS ?= tests/test_cuda_order.py tests/test_comm_cuda.py
PYTHON_TOOLS ?= memcheck synccheck
python-check:
	@cd $(ROOT); failed=; for tool in $(PYTHON_TOOLS); do \
	  echo "== $$tool $(PYTHON_TESTS)"; \
	  $(SANITIZE) --target-processes all --tool $$tool $(PYTHON) -m pytest -q -x $(PYTHON_TESTS) \
	    || failed="$$failed $$tool"; \
	done; test -z "$$failed" || { echo "FAILED:$$failed"; exit 1; }; echo "No errors."

.PHONY: all test check refusals python-check
.SECONDARY:

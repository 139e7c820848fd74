# make demo       trains a CNN on handwritten digits, on two CPU replicas or on all GPUs
# make test       the whole test suite, the sanitizer runs and the CUDA compile
# make core-test  the C core alone, without Python
# make gpu-test   the C tests that need a GPU; several where there are several
# make gpu-check  most of them under compute-sanitizer: memcheck, initcheck and synccheck
# make gpu-check-python  some of Python's under memcheck and synccheck, over the fastdp that is here
# make clean      removes what the targets above made, .venv included
#
# PYTHON=python3.12 make ...  picks the interpreter. An active virtual environment that has a torch
# is used, its torch kept; else all is installed into .venv here, never into the system's Python.

PYTHON ?= python3
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test core-test python-test sanitizer-test cuda-test gpu-test gpu-check \
        gpu-check-python environment programs clean

# Sets $$python, and what its builds need; written by `environment`.
USE = source build/environment

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

demo: environment
	@$(USE); "$$python" examples/digits.py

test: environment core-test python-test sanitizer-test cuda-test
	@echo; echo "All tests passed."

environment:
	@command -v "$(PYTHON)" > /dev/null || { \
	  echo "fastdp: there is no $(PYTHON)."; \
	  echo "On Debian or Ubuntu: sudo apt-get install python3 python3-venv"; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "fastdp: $(PYTHON) is $$("$(PYTHON)" --version), but Python 3.10 or newer is needed."; \
	  echo "Name another one: make PYTHON=python3.12 ..."; exit 1; }
	@"$(PYTHON)" build_tools/environment.py

core-test:
	@echo; echo "== The C core: plain, with address and undefined behaviour sanitizers, with threads'"
	@command -v "$${CC:-gcc}" > /dev/null || { echo "fastdp: there is no C compiler (gcc)."; \
	  echo "On Debian or Ubuntu: sudo apt-get install gcc libc6-dev"; exit 1; }
	@# Compiled on all cores, run one after another: their deadlines are real time.
	@$(MAKE) --no-print-directory -s -C tests/c -j$$(nproc) \
	  $(foreach variant,test asan tsan,build/$(variant)/test_core)
	@$(MAKE) --no-print-directory -C tests/c test asan tsan
	@echo; echo "== Simulated training: every order, and calls that fail"
	@$(MAKE) --no-print-directory -s -C tests/c -f simulate.mk -j$$(nproc) short
	@echo; echo "== The same with a wait left out: it has to be noticed"
	@"$(PYTHON)" build_tools/mutation.py --file order.c --schedules 2000
	@echo; echo "== The corpora of the fuzz targets, under address and undefined behaviour sanitizers"
	@$(MAKE) --no-print-directory -s -C tests/fuzz -j$$(nproc) PYTHON="$(PYTHON)" replay
	@echo; echo "== The CUDA device over a runtime that fails on demand"
	@mkdir -p build/core; cd tests/c; $${CC:-gcc} -std=c11 -D_GNU_SOURCE -DFDP_WITH_CUDA -g \
	  -fsanitize=address,undefined -fno-sanitize-recover=undefined -Ifake_cuda fake_device.c \
	  fake_cuda/fake_runtime.c ../../csrc/device_cuda*.c ../../csrc/status.c ../../csrc/env.c \
	  -pthread -o ../../build/core/fake_device; ../../build/core/fake_device

# Files of tests run side by side, one worker for each core; on GPUs one after another, since they
# ask how much memory is taken there and how long things last.
SIDE_BY_SIDE = $$(test -e /dev/nvidiactl || echo "-n $$(nproc) --dist loadfile")

programs: environment
	@"$(PYTHON)" build_tools/programs.py

python-test: environment programs
	@echo; echo "== The Python tests"
	@$(USE); "$$python" -m pytest -q $(SIDE_BY_SIDE)
	@echo; echo "== Steps on pretended GPUs with a wait left out: it has to be noticed"
	@$(USE); "$$python" build_tools/python_mutation.py --file awaited.py

# A build beside the editable install. What runs from its folder, with it first on the path, imports
# it; a wrong import would make the run worthless, so it is looked at.
BUILD_APART = rm -rf $(1)/lib; mkdir -p $(1); \
  "$$python" setup.py --quiet build_ext --build-lib $(1)/lib build_py --build-lib $(1)/lib; \
  cd $(1)/lib; export PYTHONPATH=$$PWD; \
  test "$$("$$python" -c 'import importlib.util as u; print(u.find_spec("fastdp").origin)')" = \
    "$$PWD/fastdp/__init__.py"

# torch throws C++ exceptions: without libstdc++ preloaded beside libasan the first one ends the
# process. Leaks of the interpreter itself are not ours to report. A report goes to a file, since
# pytest's capture would swallow it when the process ends; any report at all is a failure. A mere
# warning (an allocation that is refused on purpose) is not.
sanitizer-test: environment
	@echo; echo "== Core and seam under the address and undefined behaviour sanitizers"
	@$(USE); export FASTDP_SANITIZE=address,undefined FASTDP_CUDA=0; \
	  $(call BUILD_APART,build/sanitized); \
	  preload=$$($${CC:-gcc} -print-file-name=libasan.so); \
	  preload+=":$$($${CC:-gcc} -print-file-name=libstdc++.so.6)"; \
	  report=$$PWD/report; result=0; \
	  export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:log_path=$$report; \
	  export UBSAN_OPTIONS=print_stacktrace=1:log_path=$$report; \
	  LD_PRELOAD=$$preload PYTHONMALLOC=malloc "$$python" -m pytest -q -m seam $(SIDE_BY_SIDE) \
	    -p no:cacheprovider -c $(CURDIR)/pyproject.toml --rootdir $(CURDIR) $(CURDIR)/tests \
	    || result=$$?; \
	  for file in $$report.*; do \
	    if grep -qs 'ERROR: \|runtime error: ' "$$file"; then cat "$$file"; result=1; fi; \
	  done; \
	  exit $$result

GPU_MAKE = $(MAKE) --no-print-directory -s -C $(CURDIR)/tests/c -f gpu.mk

# A machine without a GPU can still compile all kernels, link them, and import the result. With a
# GPU the tests of tests/c/gpu.mk are also run.
cuda-test: environment
	@echo; echo "== The CUDA build"
	@$(USE); if found=$$("$$python" build_tools/toolkit.py 2>&1); then \
	  echo "$$found"; export FASTDP_CUDA=1; $(call BUILD_APART,build/cuda); \
	  "$$python" -c 'import fastdp; assert fastdp.build_info()["cuda"], fastdp.build_info(); \
	    print("built, linked and imported:", fastdp.__file__)'; \
	  $(GPU_MAKE) PYTHON="$$python" all refusals; \
	  if [ -e /dev/nvidiactl ]; then $(GPU_MAKE) PYTHON="$$python" test; \
	  else \
	    echo "the tests for GPUs compiled; they were not run: there is no GPU"; fi; \
	else echo "SKIPPED: $$found"; fi

gpu-test:
	@$(GPU_MAKE) PYTHON="$(PYTHON)" test

gpu-check:
	@$(GPU_MAKE) PYTHON="$(PYTHON)" check

gpu-check-python:
	@$(GPU_MAKE) PYTHON="$(PYTHON)" python-check

clean:
	rm -rf build .venv *.egg-info .pytest_cache .hypothesis fastdp/*.so
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
	@if [ -f tests/c/Makefile ]; then $(MAKE) --no-print-directory -C tests/c clean; fi

# Everything runs in an environment of its own, .venv, made on first use and again whenever what
# defines it changes. `make help` lists the targets.

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.made
CSRC := $(wildcard torchrec_checknrun/csrc/*)

# The stamp holds the choices that the environment was made with: they stay until others are given.
MADE := $(shell cat $(STAMP) 2>/dev/null)
PYTHON ?= $(or $(word 1,$(MADE)),python3)
DEVICE ?= $(or $(word 2,$(MADE)),auto)
CHOICE := $(PYTHON) $(DEVICE) $(CURDIR)

# Criteo data for `make demo` and `make demo-online`, more arguments for pytest.
DATA ?=
ARGS ?=

# Bytecode is kept: wheels are installed uncompiled, and tests start some hundred processes, each of which would compile
# what it imports of torch again, in twice the time of the import.
unexport PYTHONDONTWRITEBYTECODE

# Of tests, which wait for other processes at times: groups run beside each other. A group imports TorchRec once more,
# which takes seconds.
GROUPS := distributed-tests unit-tests run-tests crash-tests other-tests
distributed-tests: PATHS := tests/distributed
crash-tests: PATHS := tests/crash
run-tests: PATHS := tests/unit/run tests/unit/serve
unit-tests: PATHS := tests/unit --ignore=tests/unit/run --ignore=tests/unit/serve --ignore=tests/unit/recipes
other-tests: PATHS := tests/unit/recipes $(filter-out $(addprefix tests/,distributed unit crash __pycache__),$(patsubst %/,%,$(wildcard tests/*/)))
SYNC := $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)

# The site, in build/site: any warning fails. The variable silences an advertisement.
SITE := NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

.DEFAULT_GOAL := help
.PHONY: help env demo demo-online check lint docs test test-full race sanitize soak campaign versions clean $(GROUPS)

help:
	@echo 'make demo        the main job with a killed rank, see README; DATA=train.txt: on real Criteo data'
	@echo 'make demo-online training that publishes, a server that follows; DATA=train.txt, as well'
	@echo 'make test        make check and all tests but the slow ones; ARGS="-k name": more for pytest'
	@echo 'make test-full   the slow tests too, and all examples of property tests'
	@echo 'make race        a million races for rows between training and a save, with a thread sanitizer'
	@echo 'make sanitize    the compiled kernel under address and undefined behaviour sanitizers: half an hour'
	@echo 'make soak        1,000 checkpoints with random faults; nothing may grow or be lost'
	@echo 'make campaign    kills, storage faults, damage, hostile inputs: most of an hour'
	@echo 'make versions    the tests with other releases of torch, FBGEMM and TorchRec; ARGS=--quick: some'
	@echo 'make check       ruff, mypy, layers and the documentation alone'
	@echo 'make docs        the documentation alone, in build/site'
	@echo 'make env         the environment in .venv alone'
	@echo 'make clean       removes all of that'
	@echo 'With any of them: PYTHON=python3.12 for another interpreter, DEVICE=cpu or DEVICE=cuda for'
	@echo 'another build of FBGEMM than the one that fits this machine.'

env: $(STAMP)

# An environment made with other choices, or at another place (its scripts hold absolute paths), is
# made anew. From scratch, so that it never holds what is no longer asked for.
ifneq ($(CHOICE),$(MADE))
.PHONY: $(STAMP)
endif
$(STAMP): setup.py pyproject.toml torchrec_checknrun/install.py Makefile $(CSRC)
	$(if $(filter-out $(CSRC),$?),$(MAKE_ENVIRONMENT),$(MAKE_KERNEL))
	@echo '$(CHOICE)' > $@

# PIP_NO_COMPILE: pip's option no-compile (0 is its yes): most of 10,000 files are never imported, and to compile them
# takes half a minute.
define MAKE_ENVIRONMENT
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	{ echo '$(PYTHON) is missing or older than 3.10. Give another: make PYTHON=python3.12'; exit 1; }
@$(PYTHON) -c 'import ensurepip' || \
	{ echo '$(PYTHON) has no venv module. On Debian: apt install python3-venv'; exit 1; }
$(PYTHON) -m venv --clear $(VENV)
PIP_NO_COMPILE=0 $(PY) torchrec_checknrun/install.py --device $(DEVICE) --extras recipes,serve,kmeans,figures,cli,s3,docs,test --editable
endef

# Where nothing but the kernel's sources changed.
define MAKE_KERNEL
$(PY) setup.py --quiet build_ext --inplace
endef

demo: $(STAMP)
	$(PY) -m recipes.dlrm_criteo.demo $(if $(DATA),--data '$(DATA)')

demo-online: $(STAMP)
	$(PY) -m recipes.dlrm_criteo.online_demo $(if $(DATA),--data '$(DATA)')

check: lint
	$(SITE) --quiet

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@# For the oldest Python there is; from 3.12 on, types of its NumPy can't be read for an older one.
	@# Python 3.10 itself has an older NumPy, whose arrays have no types by default.
	@if $(PY) -c 'import sys; sys.exit(sys.version_info >= (3, 11))'; then \
		echo 'mypy is left out: it needs the types of NumPy 2.3, and so Python 3.11'; \
	else \
		set -x; $(PY) -m mypy --python-version $(shell $(PY) -c \
			'import sys; print("3.10" if sys.version_info < (3, 12) else "3.12")'); \
	fi
	$(VENV)/bin/lint-imports --no-cache

docs: $(STAMP)
	$(SITE)

# The slow tests, which need a processor for themselves, run two groups at a time.
test test-full: JOBS = --jobs 6
test-full: JOBS = --jobs 2
test-full: export CHECKNRUN_TESTS = full
SELECT := $(if $(filter full,$(CHECKNRUN_TESTS)),--timeout 1800,-m 'not slow')

test test-full: $(STAMP)
ifeq ($(ARGS),)
	@echo 'ruff and mypy, and tests in groups: several at once, each is shown when it is done'
	@# Without the site: tests/docs builds it, as strictly.
	@$(MAKE) --no-print-directory --keep-going $(JOBS) $(SYNC) lint $(GROUPS) || \
		{ echo 'make $@: FAILED: each line above that begins with "make[1]: ***" names a group'; exit 1; }
	@echo 'make $@: passed: ruff, mypy, layers, $(GROUPS)'
else
	@$(MAKE) --no-print-directory check
	$(PY) -m pytest $(if $(filter test,$@),-m 'not slow',--timeout 1800) $(ARGS)
endif

$(GROUPS):
	$(PY) -m pytest $(SELECT) --durations=20 $(PATHS)

# Nothing of the environment: a C++ compiler alone.
race:
	@mkdir -p build
	$(CXX) -std=c++17 -O1 -g -fsanitize=thread -pthread tests/race/copy_on_write.cpp -o build/race
	TSAN_OPTIONS='halt_on_error=1 exitcode=66' build/race 1000000

# The kernel under the address and undefined behaviour sanitizers, in a copy of the tree: a report ends the process. Python
# itself is not built with them, so they are loaded first, and do not look for leaks.
SANITIZED := build/sanitized
SANITIZE := -fsanitize=address,undefined -fno-sanitize=vptr
CALLS_KERNEL := codecs delta format marks memory recovery restore run save serve shared_memory snapshot test_native.py
sanitize: $(STAMP)
	rm -rf $(SANITIZED)
	mkdir -p $(SANITIZED)
	git ls-files -z | xargs -0 cp --parents -t $(SANITIZED)
	cd $(SANITIZED) && CFLAGS='-fno-omit-frame-pointer $(SANITIZE)' LDFLAGS='$(SANITIZE)' \
		$(abspath $(PY)) setup.py --quiet build_ext --inplace
	cd $(SANITIZED) && export PYTHONPATH=$(abspath $(SANITIZED)) ASAN_OPTIONS=detect_leaks=0 \
		UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
		LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" && \
		$(abspath $(PY)) -m pytest -m 'not slow' $(addprefix tests/unit/,$(CALLS_KERNEL)) && \
		$(abspath $(PY)) -W ignore -m tests.campaign --part hostile

soak: $(STAMP)
	$(PY) -W ignore -m tests.crash.soak --checkpoints 1000 --json recipes/results/soak.json

campaign: $(STAMP)
	$(PY) -m tests.campaign --json recipes/results/campaign.json
	$(PY) -m tests.campaign --markdown recipes/results/campaign.json --docs docs/explanation/consistency_and_crashes.md

versions: $(STAMP)
	$(PY) -m recipes.versions $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info torchrec_checknrun/_C*.so .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

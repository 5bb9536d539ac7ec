# SPDX-License-Identifier: Apache-2.0
# Everything runs in .venv, which `make env` makes and which the other targets bring up to date.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
TESTS  ?= tests
PYTEST_FLAGS ?= -ra --durations=10
WORKERS ?= 2
FUZZ_FLAGS ?=

# Only a run of all tests is held to the coverage that all tests reach.
WHOLE := $(if $(filter-out tests,$(TESTS))$(filter -k% -m%,$(PYTEST_FLAGS)),,yes)
REPORT := .coverage.json
AT_ONCE := -n $(WORKERS) --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help env demo test fuzz lint format types wheel clean

help:  ## this list
	@echo "Targets:"
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

env:  ## the environment: torch and vLLM for CPUs, test tools, this package (editable)
	@$(PYTHON) tests/tools/setup_env.py $(VENV)

demo: env  ## serve a tiny Qwen2.5-VL twice, eager and with encoder graphs, and compare the answers
	@$(PY) docs/examples/demo.py

test: env  ## the tests and their coverage (TESTS=path for some of them, PYTEST_FLAGS=... for other flags)
	@rm -f $(REPORT)
	HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-ci} HF_HUB_OFFLINE=1 \
	    $(PY) -m pytest -q $(PYTEST_FLAGS) $(if $(WHOLE),$(AT_ONCE) --cov --cov-report=json:$(REPORT)) $(TESTS)
	$(if $(WHOLE),@$(PY) tests/tools/coverage_gate.py $(REPORT))

fuzz: env  ## each property 5,000 times; goes on where it was left (TESTS=path, FUZZ_FLAGS="--minutes 60")
	@HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-nightly} HF_HUB_OFFLINE=1 \
	    $(PY) tests/tools/fuzz.py $(FUZZ_FLAGS) $(TESTS)

lint: env  ## ruff: format and lint
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

format: env  ## let ruff write the format
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

types: env  ## mypy on the package
	$(PY) -m mypy vllm/vit_cudagraph

wheel: env  ## dist/*.whl
	rm -rf build
	$(PY) -m build --wheel --no-isolation
	@ls -l dist/*.whl

clean:  ## remove builds and caches (.venv stays)
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .fuzz .coverage*
	find vllm tests docs benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

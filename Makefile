# The lab's commands. Without PYTHON=, everything runs in an environment of its own, build/venv, made once from
# lib/requirements.txt; with PYTHON=python3 (a container that brings its torch), in the Python that is there.

SHELL := /bin/bash
VENV := build/venv
READY := $(if $(PYTHON),,$(VENV)/.ready)
RUN := PYTHONPATH=$(CURDIR)/lib$${PYTHONPATH:+:$$PYTHONPATH} $(or $(PYTHON),$(VENV)/bin/python)
JOBS ?= 2
# One BLAS thread a worker: the workers share the cores, and BLAS threads that wait for each other are slower than one.
TEST_ENV := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TQDM_DISABLE=1

.PHONY: help lab test report notebooks tune profile sanitize submission judge aot doctor clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 20

lab: $(READY)  ## open JupyterLab on the notebooks, on localhost with its token
	$(RUN) -m jupyterlab --ServerApp.ip=127.0.0.1 --ServerApp.root_dir=notebooks $(if $(filter 0,$(shell id -u)),--allow-root)

test: $(READY)  ## run the notebooks and the tests headlessly
	$(RUN) lib/qkvlab/doctor.py
	$(TEST_ENV) $(RUN) -m pytest -c lib/pyproject.toml --rootdir=. -p no:cacheprovider -q -n $(JOBS) --dist loadscope \
	    --nbval --nbval-current-env --nbval-cell-timeout=600 notebooks lib/tests

report: $(READY)  ## latency versus SOL: measured on a GPU, else from the recorded run; redraws data/figures
	$(RUN) -m qkvlab report

notebooks: $(READY)  ## execute the notebooks in place, as they are committed (on a machine without a GPU)
	$(TEST_ENV) $(RUN) -m jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False notebooks/*.ipynb

tune: $(READY)  ## search launch configurations on this GPU, correctness first: writes data/tuned/<gpu>.json
	$(RUN) -m qkvlab tune

profile: $(READY)  ## Nsight Compute on one stage and case: make profile STAGE=fused CASE=0
	$(RUN) -m qkvlab profile $(or $(STAGE),fused) $(or $(CASE),0)

sanitize: $(READY)  ## compute-sanitizer's memcheck and racecheck on one stage, or on all: make sanitize STAGE=fused
	$(RUN) -m qkvlab sanitize $(STAGE)

submission: $(READY)  ## a SOL-ExecBench solution.json of a stage: make submission STAGE=fused STYLE=return
	$(RUN) -m qkvlab submit $(or $(STAGE),auto) --style $(or $(STYLE),return)

judge: $(READY)  ## SOL-ExecBench's own evaluator on one stage, or on all: make judge STAGE=fused
	$(RUN) -m qkvlab judge $(STAGE)

aot: $(READY)  ## compile one stage, or all, for a GPU that is not here: make aot ARCH=sm_90 STAGE=persistent
	$(RUN) -m qkvlab aot --arch $(or $(ARCH),sm_100) $(STAGE)

doctor: $(READY)  ## what this Python lacks, and what the lab sees of the machine
	$(RUN) lib/qkvlab/doctor.py

clean:  ## remove build/, the environment included
	rm -rf build

$(VENV)/.ready: lib/requirements.txt lib/pyproject.toml
	python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r lib/requirements.txt
	@if ls /proc/driver/nvidia/gpus/* >/dev/null 2>&1; then \
	    $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e './lib[gpu]' -c lib/requirements.txt; fi
	touch $@

# Everything starts here: `make lab` on a fresh machine. `make help` lists the rest.

.DEFAULT_GOAL := help
.PHONY: help lab workshop slides test test-more test-all soak study setup lock clean distclean
export PYTHON TORCH MPI
export OMP_WAIT_POLICY ?= PASSIVE
BIN := .venv/bin
STUDY ?= laptop
# Notebooks and tests call programs of .venv by name: mpiexec, torchrun, aiscale.
WITH_PATH := PATH="$(CURDIR)/$(BIN):$$PATH"
PYTEST := $(WITH_PATH) $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*##/ {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo 'NOTEBOOKS="00 03"       workshop: only these notebooks      ARGS="..."  more arguments for workshop, slides, test,'
	@echo 'DECKS="03 radius"       slides: only these decks                       soak, lab'
	@echo 'PYTHON=python3.12       the interpreter of .venv            TORCH=cpu   cuda or rocm: that build of torch; a version;'
	@echo 'MPI=site                no mpich, the site has an MPI                   site, the one that a module has loaded'

lab:  ## start here: install what the lessons need, and open notebook 00 in JupyterLab
	@scripts/setup.sh lessons
	@$(WITH_PATH) $(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb $(ARGS) .

workshop: setup  ## install everything, run every notebook without a browser, and build the gallery
	@$(BIN)/aiscale notebooks $(NOTEBOOKS) --gallery $(ARGS)

slides: setup  ## build the decks, with PDFs where there is a Chromium; runs the notebooks whose figures they show
	@$(BIN)/aiscale slides $(DECKS) $(ARGS)

test: setup  ## run the tests: every promise once, on real processes (20 to 25 minutes on two cores)
	@$(PYTEST) -m "not extended" $(ARGS)

test-more: setup  ## run what test leaves out: whole ladder, byte table and notebooks, Slurm, planted faults
	@$(PYTEST) -m extended $(ARGS)

test-all: test test-more  ## run both (an hour)

soak: setup  ## disturb jobs over and over, and see whether anything gets lost; goes on where it was interrupted
	@$(WITH_PATH) PYTHONPATH=tests $(BIN)/python -m soak $(ARGS)

study: setup  ## run the laptop study twice (an hour, alone on the machine) and store it for lesson 09; resumes
	@for run in 1 2; do $(BIN)/aiscale bench study $(STUDY) --out runs/$(STUDY)-$$run.csv || exit; done
	@$(BIN)/aiscale bench compare runs/$(STUDY)-1.csv runs/$(STUDY)-2.csv
	@$(BIN)/aiscale bench compare runs/$(STUDY)-1.csv runs/$(STUDY)-2.csv --json > runs/$(STUDY).json
	@mv runs/$(STUDY).json src/aiscale/published/measured/study.json

setup:  ## install everything that is missing into .venv
	@scripts/setup.sh

lock: setup  ## resolve requirements.lock anew from pyproject.toml
	@scripts/lock.sh

clean:  ## remove what was built
	rm -rf build .pytest_cache .ruff_cache

distclean: clean  ## remove .venv too
	rm -rf .venv

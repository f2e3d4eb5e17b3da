# From nothing to a served model: make serve. Everything else: make help.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup serve test test-quick test-full test-all test-docs test-tools nightly release vulnerabilities test-clients test-deploy test-stores test-upstream test-slurm test-kubernetes test-images image-vllm lint fmt surface corpus mutants bench bench-against  bench-pull attack faults lock clean

# cog-triton reads COG_HOST, PORT and TRITON_{HTTP,GRPC,METRICS}_PORT from its environment. Make hands
# it those of its own environment and command line; an `export` here would add empty ones.

BIN := .venv/bin
WORKERS := 3
TIMEOUT := 600
CONFIG := configs/build/smollm2-135m-cpu.yaml

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make .venv from the lock (PYTHON=python3.11)
	@scripts/setup

engine.tar: | setup
	@$(BIN)/cog-triton build $(CONFIG) -o $@

serve: setup engine.tar ## build engine.tar if absent and serve it (PORT=5000 COG_HOST=127.0.0.1 ARGS=...)
	@exec $(BIN)/cog-triton serve engine.tar $(ARGS)

# A test that hangs, with its fixtures, is reported after TIMEOUT seconds with the stacks of its threads.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder \
  -o faulthandler_timeout=$(TIMEOUT) -o faulthandler_exit_on_timeout=true
LAYERS := tests/unit $(wildcard tests/process) tests/integration tests/kills
MOST := -m "not full and not nightly"

# A run that is cut short leaves no list of failed tests: CI would run these again, and pass.
test: lint ## lint and the tests of all layers: some 6 minutes (TESTS="-k name" WORKERS=3 TIMEOUT=600)
	@$(PYTEST) --durations=10 $(ARGS) $(or $(TESTS),$(MOST) --most-starts 30 $(LAYERS)) || { code=$$?; \
	  [ $$code -le 1 ] || rm -f .pytest_cache/v/cache/lastfailed; exit $$code; }

test-quick: lint ## lint and the unit tests: a minute (TESTS="tests/unit/test_x.py")
	@$(PYTEST) -q $(MOST) $(or $(TESTS),tests/unit)

test-full: setup ## the tests of the layers that make test leaves out: all kills, what takes long (MPI=1: gets Open MPI)
	@scripts/setup-mpi
	@$(PYTEST) --durations=10 -m full $(ARGS) $(LAYERS)

test-all: test test-full test-docs test-deploy ## make test, and all that takes less than 20 minutes in all
	@$(PYTEST) -q -m "hypothesis and not full and not nightly" --hypothesis-profile all tests/unit
	@$(MAKE) --no-print-directory faults ARGS="--minutes 2 --engine mock"
	@$(MAKE) --no-print-directory test-clients CLIENT=common

test-docs: setup engine.tar ## run the commands of the pages
	@$(PYTEST) -q tests/tools/test_doc_blocks.py

nightly: setup ## run the long suites, one by one, and write nightly.json (SUITES="stores slurm" KUBE_BIN=DIR KUBECONFIG=FILE TRTLLM=DIR)
	@$(BIN)/python scripts/nightly.py $(SUITES)

test-tools: setup ## test scripts, benchmarks, faults and what images are made by: no product code
	@$(PYTEST) -q $(or $(TESTS),tests/tools)

test-clients: setup ## run released clients against a server, some in Node (CLIENT="openai llm", common or rest; ARGS=--help)
	@$(BIN)/python tests/clients/run_suite.py $(CLIENT) $(ARGS)

test-deploy: setup ## render the Helm chart, hold deploy/ to the schemas of Kubernetes (fetches 250 MB once)
	@scripts/setup-tools
	@$(BIN)/python -m pytest -q tests/deploy $(ARGS)

test-stores: setup ## download from servers of S3, Google's and Azure's stores, keep responses in Redis (fetches 250 MB once)
	@scripts/setup-tools
	@$(BIN)/python -m pytest -q tests/stores $(ARGS)

test-upstream: setup ## run TensorRT-LLM's own scripts of TRTLLM=DIR, its sources (ARGS="llama --tp 2")
	@scripts/setup-upstream
	@$(BIN)/python tests/upstream/run_upstream.py $(or $(TRTLLM),$(error TRTLLM=DIR, TensorRT-LLM's sources)) $(ARGS)

test-slurm: setup ## run deploy/slurm.sh under a real Slurm of two nodes on this machine (root, Debian)
	@scripts/setup-slurm
	@$(BIN)/python -m pytest -q tests/slurm $(ARGS)

test-kubernetes: setup ## operate the chart on a real Kubernetes: KUBECONFIG=FILE, or one node of the binaries in KUBE_BIN=DIR (root)
	@scripts/setup-tools
	@KUBE_BIN=$(KUBE_BIN) KUBECONFIG=$(KUBECONFIG) IMAGE=$(IMAGE) \
	  $(if $(KUBE_BIN),unshare --mount --net --pid --fork --mount-proc --kill-child) \
	  $(BIN)/python -m pytest -q -n 0 tests/kubernetes $(ARGS)

test-images: setup engine.tar ## build every image from look-alikes, run and test them (needs Nix, docker)
	@ENGINE_TAR=engine.tar $(BIN)/python -m pytest tests/nix $(ARGS)

image-vllm: ## build the vLLM runner image of one GPU architecture (SM=90 ARGS=--stand-ins)
	@scripts/image-vllm $(ARGS) $(SM)

lint: setup ## ruff, mypy, and the lines of each folder (budget.txt)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/python scripts/budget.py

fmt: setup ## reformat, fix what ruff can fix, and lower the numbers of budget.txt that fell
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix
	@$(BIN)/python scripts/budget.py --lower

surface: setup ## compare the names that users rely on with tests/surface.txt (ARGS=--keep: the change is meant)
	@$(BIN)/python scripts/surface $(ARGS)

corpus: setup ## ask what clients see again, of this tree or of a commit (REF=4ade877b ARGS="--only predictions --keep")
	@$(BIN)/python -m tests.corpus $(REF) $(ARGS)

mutants: setup ## change lines of modules that tests must fail for (MODULE="admission resume" ARGS=--changed=main)
	@$(BIN)/python scripts/mutants.py $(MODULE) $(ARGS)

bench: setup engine.tar ## measure a token, a request, a start, and memory (ARGS=--quick)
	@for name in hot_path memory start_up; do $(BIN)/python benchmarks/$$name.py $(ARGS) || exit; done

bench-against: setup ## measure this tree beside another commit, or the last release, in turns (REF=37f5e42 ARGS="--rounds 5 --hold")
	@$(BIN)/python benchmarks/against_commit.py $(REF) $(ARGS)

bench-pull: setup engine.tar ## measure an image from registry to first token (IMAGE=./result, Nix's)
	@$(BIN)/python benchmarks/pull_to_ready.py $(or $(IMAGE),./result) engine.tar $(ARGS)

attack: setup ## send hostile inputs to servers, and stop them under load (ARGS="--inputs 20000 --only inputs,drains")
	@$(BIN)/python tests/faults/attack.py $(ARGS)

faults: setup engine.tar ## break a server in every way under load (MINUTES=5 ARGS="--only kill --engine mock")
	@$(BIN)/python tests/faults $(if $(MINUTES),--minutes $(MINUTES)) $(ARGS)

lock: setup ## resolve requirements/*.lock and nix/wheels.json (ARGS="--upgrade-package NAME")
	@$(BIN)/python scripts/lock $(ARGS)

release: setup ## make dist/VERSION and the tag (VERSION=0.3.0 REGISTRY=host/me KEY= ARGS=--rehearse; docs/releases.md)
	@scripts/release $(or $(VERSION),$(error VERSION=X.Y.Z)) $(ARGS)

vulnerabilities: setup ## compare the locks with known vulnerabilities (OSV=all.zip SBOM=image.spdx.json)
	@$(BIN)/python scripts/vulnerabilities.py --osv $(or $(OSV),$(error OSV=all.zip)) $(if $(SBOM),--sbom $(SBOM))

clean: ## remove .venv, engine.tar and all caches
	rm -rf .venv .work dist engine.tar .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What people type. `make help` lists it; every target is one command or two, and what takes more is in a script.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help run test lint fmt images bench bench-engine bench-rings bench-conversations bench-kernels bench-experts bench-experts-ring bench-70b check-gpu check-cuda fuzz faults assets

PYTHON ?= python3
# Where what is fetched stays.
CACHE := $(or $(PRIMA_CACHE),$(HOME)/.cache/prima)
# The model that `make run` fetches; with MODEL=path nothing is fetched.
FETCHED_MODEL := $(CACHE)/models/SmolLM2-135M-Instruct-Q4_1.gguf
MODEL ?= $(FETCHED_MODEL)
MEMBERS ?= 3
# Everything that may build HiGHS, the planner's solver, has what that takes.
WITH := operator/halda/with-native-tools.sh

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-19s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "Variables of run: MODEL=file.gguf MEMBERS=3 PORT=8080 ARGS='--rounds 2 --split 15,10,5'"

run: ## Build, fetch a small model (93 MB, once), answer from a ring of three agents on this machine
	$(WITH) cargo build --release --locked -p prima -p prima-node-agent
	$(if $(filter $(FETCHED_MODEL),$(MODEL)),$(PYTHON) tests/assets/fetch.py run)
	target/release/prima run '$(MODEL)' --members $(MEMBERS) $(if $(PORT),--port $(PORT)) $(ARGS)

test: ## Run the tests whose inputs changed since they passed here (FRESH=1: all; SUITES=names: these); says what it left out
	$(WITH) env $(if $(FRESH),FRESH=1) $(PYTHON) tests/run $(if $(SUITES),$(foreach suite,$(SUITES),'$(suite)'))

lint: ## Formatting, clippy, and cargo-deny (dependency directions, licenses, sources; known vulnerabilities, where GitHub can be reached)
	cargo fmt --all --check
	@! git grep -nE 'fn [a-z0-9_]{60,}\(' -- '*.rs' || { echo 'a name of 60 letters or more is read twice: shorten it'; exit 1; }
	$(WITH) cargo clippy --workspace --all-targets --features prima-fuzz/targets --locked -- -D warnings
	cargo fetch --locked
	tools=$$(tests/tool.sh cargo-deny 0.20.2 --no-default-features) && export PATH="$$tools:$$PATH" && \
	cargo deny --offline --locked check --hide-inclusion-graph bans licenses sources && \
	if cargo deny fetch db 2> /dev/null; then cargo deny --offline --locked check --hide-inclusion-graph advisories; \
	else echo 'not checked: known vulnerabilities of dependencies, as their database (github.com/RustSec/advisory-db) cannot be reached'; fi

fmt: ## Format the code
	cargo fmt --all

images: ## Build the container images for amd64 and arm64 into one archive, with docker, podman or buildah (TAG=0.1.0-2: under this tag)
	$(if $(TAG),TAG='$(TAG)') images/build.sh

bench: bench-engine bench-rings bench-conversations bench-experts ## Measure speed against llama.cpp and bare TCP, side by side (four hours); prints tables

bench-engine: ## Only the engine beside llama.cpp, and how near both are to what the machine can do (40 minutes)
	$(PYTHON) tests/assets/fetch.py bench
	$(WITH) cargo run --profile dist --locked -p prima-bench -- --engine

bench-rings: ## Only the rings and the planner: hops, less memory than the model, predicted against measured (45 minutes)
	$(PYTHON) tests/assets/fetch.py bench
	$(WITH) cargo build --profile dist --locked -p prima -p prima-node-agent
	$(WITH) cargo run --profile dist --locked -p prima-bench -- --rings

bench-conversations: ## Only conversations beside llama-server: second turns, 16 chats at once, answers beside a long prompt, speculation, also over long links, encryption, forms of answers, a siege (some two hours; SECTIONS='masks siege': these)
	$(PYTHON) tests/assets/fetch.py bench-conversations
	$(WITH) cargo build --profile dist --locked -p prima -p prima-node-agent
	$(WITH) cargo run --profile dist --locked -p prima-bench -- --conversations $(SECTIONS)

bench-kernels: ## Only the matrix kernels, each weight format at each level of instructions (10 minutes)
	$(WITH) cargo run --profile dist --locked -p prima-bench -- --kernels

bench-experts: ## Only mixtures of experts beside llama.cpp, in memory and with memory for a part of the experts (40 minutes)
	$(PYTHON) tests/assets/fetch.py bench-experts
	$(WITH) cargo build --profile dist --locked -p prima -p prima-node-agent
	$(WITH) cargo run --profile dist --locked -p prima-bench -- --experts

bench-experts-ring: ## Measure a mixture of experts in a ring of four machines with 4 GiB each (writes 19 GB, once; root)
	$(PYTHON) tests/assets/fetch.py bench-experts-ring
	$(WITH) cargo build --profile dist --locked -p prima -p prima-node-agent
	$(WITH) cargo run --profile dist --locked -p prima-bench -- --experts-ring

bench-70b: ## Measure a model of 70B in a ring of four machines with 4 GiB each (writes 43 GB, once; root)
	$(PYTHON) tests/assets/fetch.py bench-70b
	$(WITH) cargo build --profile dist --locked -p prima -p prima-node-agent
	$(WITH) cargo run --profile dist --locked -p prima-bench -- --70b

check-gpu: ## Check and measure layers on this machine's GPU; target/gpu-check.tar.xz does so on others (PRIMA_GPU=software: without a GPU)
	$(if $(filter software,$(PRIMA_GPU)),$(PYTHON) tests/run/machine.py vulkan)
	$(PYTHON) tests/assets/fetch.py gpu
	$(WITH) $(PYTHON) tests/gpu/bundle.py
	rm -rf target/gpu-check
	tar -C target -xf target/gpu-check.tar.xz
	$(if $(filter software,$(PRIMA_GPU)),drivers=$$(tests/gpu/lavapipe.sh); $${drivers:+env VK_DRIVER_FILES="$$drivers"}) \
	  env MESA_SHADER_CACHE_DIR='$(or $(MESA_SHADER_CACHE_DIR),$(CACHE)/vulkan)' target/gpu-check/check

check-cuda: ## Compile the CUDA build on a machine without a GPU
	node-agent/engine/check-cuda.sh

fuzz: ## Fuzz what reads headers, frames, templates, requests and servers' answers, an hour each (SECONDS_EACH=60 TARGETS='header frame': these)
	$(WITH) env $(if $(SECONDS_EACH),SECONDS_EACH=$(SECONDS_EACH)) $(PYTHON) tests/fuzz/run.py $(TARGETS)

faults: ## Try many random sequences of faults on a Model (SEQUENCES=200 SEED=n; SEQUENCE='cut:0@500+8000': this one; CLUSTER=1: on a real cluster, or there LOAD=1000 requests over upgrades and drains; root)
	$(PYTHON) tests/assets/fetch.py run
	$(PYTHON) tests/run/machine.py api-server faulty-machines $(if $(CLUSTER),nodes)
	$(WITH) cargo build --locked -p prima -p prima-node-agent
	$(WITH) env $(if $(CLUSTER),CLUSTER=1) $(if $(LOAD),LOAD=$(LOAD)) $(if $(SEQUENCES),SEQUENCES=$(SEQUENCES)) $(if $(SEED),SEED=$(SEED)) $(if $(SEQUENCE),SEQUENCE='$(SEQUENCE)') \
	  cargo run --locked -p prima-faults

assets: ## Fetch the models, texts and tools of the tests (in ~/.cache/prima, or PRIMA_CACHE)
	$(PYTHON) tests/assets/fetch.py test

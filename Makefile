# Commands of developers, listed by `make help`. Each runs cargo, or a script that can be run by
# itself.
SHELL := /bin/bash
.DEFAULT_GOAL := help

CARGO ?= cargo
target := $(if $(CARGO_TARGET_DIR),$(CARGO_TARGET_DIR),target)

# Programs that run as processes in the demo and in the tests.
programs := tessera-driver tessera-controller tessera-probe tessera-fake-world tessera-fake-nvml tessera-fake-cuda \
            tessera-mps tessera-fake-mps-control tessera-fake-clock tessera-simcluster tessera-cli

# The packages of the images and of the kubectl plugin.
shipped := tessera-controller tessera-driver tessera-mps tessera-cli tessera-intercept tessera-intercept-cuda \
           tessera-intercept-nvml

# A build with fault points replaces the shipped programs in the target directory, until the next
# build without them: so that one follows.
fault_points := --package=tessera-driver --package=tessera-controller --package=tessera-runtime \
                --features=tessera-driver/fault-points,tessera-controller/fault-points

.PHONY: help
help: ## Show this menu
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

.PHONY: build
build: ## Build the programs that the demo and the tests run
	$(CARGO) build --locked $(QUIET) $(addprefix --package=,$(programs))
	$(CARGO) build --locked $(QUIET) --profile intercept --package tessera-intercept --package tessera-intercept-cuda --package tessera-intercept-nvml

.PHONY: demo
demo: ## Show all of Tessera on this machine: no root, no GPU, no Kubernetes needed
	@echo "Building, about 2 minutes the first time."
	@$(MAKE) --silent build QUIET=--quiet
	@$(target)/debug/tessera-simcluster demo

.PHONY: test
test: build ## Run every test that needs neither root nor a cluster
	$(CARGO) test --locked $(fault_points) --test fault_points $(if $(SHOW_SKIPPED),-- --show-output)
	$(CARGO) test --locked --workspace --exclude tessera-e2e $(if $(SHOW_SKIPPED),-- --show-output)
	$(CARGO) test --locked --package tessera-e2e --lib --test layers --test docs --test faults
	$(CARGO) test --locked --package tessera-e2e --test simcluster --test chaos

# On the simulated cluster. Tests of faults and clocks are in a program of their own.
trials_of = $(if $(filter trial/chaos trial/wrong-clock,$(TEST)),chaos,simcluster)

.PHONY: test-one
test-one: build ## Run the tests with TEST=... in their names, of PACKAGE=... or of all: a function, scenario/... or trial/...
	@test -n "$(TEST)" || { echo "make test-one TEST=part of a name" >&2; exit 2; }
ifneq ($(filter scenario/% trial/% example/%,$(TEST)),)
	$(CARGO) test --locked --package tessera-e2e --test $(trials_of) -- $(TEST)
else
	set -o pipefail; $(CARGO) test --locked $(if $(PACKAGE),--package=$(PACKAGE),--workspace --exclude tessera-e2e) -- --show-output $(TEST) | \
	  awk '{ print } /^test .* \.\.\. / { ran++ } END { if (!ran) { print "error: no test matches $(TEST)"; exit 1 } }'
endif

.PHONY: test-arm64
test-arm64: ## Build the interceptor for aarch64 and try it in emulation (Debian; fetches 300 MB the first time): TESTS=all
	intercept/hook/tests/arm64.sh $(TESTS)

# A comma separates the arguments of functions of make: $(or) would take the first stack only.
REAL ?= runtime,tools,arrays
.PHONY: real-programs
real-programs: ## Unmodified programs above CUDA on the fake driver, with and without the interceptor (fetches 1 GB of Python packages): REAL=runtime,tools,arrays,torch,jax,onnx,tensorflow,vllm
	TESSERA_REAL_STACKS=$(REAL) $(CARGO) test --locked --package tessera-intercept-hook --test real_programs -- --test-threads=1 --show-output

.PHONY: judge
judge: ## Judge the allocator by published results and golden cases, in full (optimised build; 7 minutes on two cores)
	$(CARGO) test --locked --release --package tessera-judge

.PHONY: soak
soak: build ## The long tests on the simulated cluster, in full: PODS=10000 CLAIMS=10000 (SEED=... repeats one)
	TESSERA_SOAK_PODS=$(or $(PODS),10000) TESSERA_FENCE_CLAIMS=$(or $(CLAIMS),10000) $(if $(SEED),TESSERA_SOAK_SEED=$(SEED)) \
	  $(CARGO) test --locked --package tessera-e2e --test simcluster -- two-allocators trial/soak

release_programs:
	$(CARGO) build --locked --release $(addprefix --package=,$(programs)) --package=tessera-attacks
	$(CARGO) build --locked $(QUIET) --profile intercept --package tessera-intercept --package tessera-intercept-cuda --package tessera-intercept-nvml
.PHONY: release_programs

.PHONY: attack
attack: release_programs ## Attack a simulated cluster at random beside an honest namespace: MINUTES=10 PEACE=2 SEED=... OPTIONS=--help
	$(target)/release/attacker --minutes $(or $(MINUTES),10) --peace $(or $(PEACE),2) $(if $(SEED),--seed $(SEED)) $(OPTIONS)

.PHONY: test-attacks
test-attacks: build ## Repeat the findings of the security review on the simulated cluster (4 minutes; part of make test)
	$(CARGO) test --locked --package tessera-attacks

.PHONY: bench-attacks
bench-attacks: release_programs ## Repeat the findings of the security review with their own limits of time (optimised build, idle machine; minutes)
	TESSERA_ATTACKS_STRICT=1 $(CARGO) test --locked --release --package tessera-attacks -- --nocapture

.PHONY: e2e
e2e: ## Run Tessera on a real Kubernetes 1.37, or K8S=1.36, on this machine (root and Go; fake GPUs; 15 minutes the first time): TEST=...
	e2e/cluster/run.sh $(TEST)

.PHONY: karpenter-check
karpenter-check: ## Have Karpenter add and remove nodes for pods with GPUs of Tessera (root and Go; 10 minutes the first time): FENCE=rule
	e2e/cluster/karpenter.sh $(FENCE)

.PHONY: e2e-kind
e2e-kind: ## The same tests on kind (Docker): TEST=...
	e2e/cluster/kind.sh $(TEST)

.PHONY: lint
lint: ## Formatting, words, clippy, documentation, dependencies, shell scripts, the chart
	$(CARGO) fmt --all --check
	$(CARGO) run --locked --quiet --package tessera-lint
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	$(CARGO) clippy --locked $(fault_points) --all-targets -- -D warnings
	$(CARGO) clippy --locked --package tessera-intercept --features hami -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --workspace --no-deps --quiet
	$(CARGO) deny --locked check --hide-inclusion-graph bans licenses sources
	e2e/cluster/lint.sh

.PHONY: advisories
advisories: ## Check the dependencies against the RustSec database, which it fetches (needs cargo-deny)
	$(CARGO) deny --locked check --hide-inclusion-graph advisories

.PHONY: sbom
sbom: ## Write what each shipped program is built of, as CycloneDX, to target/sbom (needs cargo-sbom)
	mkdir -p $(target)/sbom
	for package in $(shipped); do \
		$(CARGO) sbom --cargo-package $$package --output-format cyclone_dx_json_1_6 > $(target)/sbom/$$package.cdx.json || exit 1; \
	done

.PHONY: reference
reference: ## Write the generated pages of docs/reference anew
	$(CARGO) run --locked --quiet --package tessera-reference

.PHONY: format
format: ## Format code, and wrap comments at 100 columns (nightly Rust)
	$(CARGO) +nightly fmt --all -- --config wrap_comments=true,comment_width=100

.PHONY: bench
bench: ## Print the figures: kubelet calls, start, memory (with the machine they were taken on)
	$(CARGO) build --locked --release --package tessera-fake-nvml
	$(CARGO) bench --locked --package tessera-driver --bench node

# Kubernetes' own allocator as a program: see its README.
oracle := $(abspath $(target))/oracle

.PHONY: oracle
oracle:
	cd testing/oracle && go build -o $(oracle) .

.PHONY: goldens-check
goldens-check: oracle ## Ask Kubernetes' own allocator again and compare the golden files byte for byte (Go, Python; a minute)
	cd testing/oracle && go vet ./... && go test ./...
	testing/oracle/goldens.sh check $(oracle)

.PHONY: autoscaler-check
autoscaler-check: ## Ask kube-scheduler's framework what an autoscaler finds under each fence (Go; minutes the first time)
	# The flags of e2e/cluster/build.sh, so that both use the same compiled packages.
	cd testing/autoscaler && CGO_ENABLED=0 go test -trimpath ./...

.PHONY: goldens
goldens: oracle ## Write the golden files again, after a change of testing/oracle (Go, Python)
	testing/oracle/goldens.sh write $(oracle)

.PHONY: bench-intercept
bench-intercept: ## Time calls with the interceptor beside the same calls without it, in turn (a C compiler): ROUNDS=3
	$(if $(ROUNDS),ROUNDS=$(ROUNDS)) $(CARGO) bench --locked --package tessera-intercept-hook --bench intercept

# Stacked borrows are not checked: both crates forbid unsafe code, and each access to a ledger of
# 60 KiB would take seconds.
.PHONY: miri
miri: ## Run the tests of the interceptor's layouts and limiter by Miri, smaller than usual (nightly Rust; minutes)
	@$(CARGO) +nightly miri --version >/dev/null 2>&1 || \
	  { echo "make miri needs Miri: rustup toolchain install nightly --component miri,rust-src" >&2; exit 1; }
	MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-disable-stacked-borrows" PROPTEST_CASES=2 $(CARGO) +nightly miri test --locked --target-dir $(target)/miri \
	  --package tessera-intercept-abi --package tessera-intercept-limiter --lib

.PHONY: bench-gpu
bench-gpu: ## Try the interceptor on this machine's first NVIDIA GPU, for docs/benchmarks/gpu.md (a C compiler; minutes)
	@$(CARGO) bench --locked --quiet --package tessera-intercept-hook --bench gpu

.PHONY: bench-allocator
bench-allocator: oracle ## Time the allocator beside Kubernetes' own, in turn (Go; minutes): RUNS=3
	$(CARGO) build --locked --release --package tessera-judge
	$(target)/release/bench --oracle $(oracle) --runs $(or $(RUNS),3)
	$(target)/release/bench --oracle $(oracle) --pending 10000 filter-5000x8
	$(target)/release/bench --oracle $(oracle) --pending 1000 filter-500x8-shares10k

.PHONY: fuzz-allocator
fuzz-allocator: oracle ## Compare the allocator with Kubernetes' own on fresh random cases (Go): MINUTES=10 SEED=...
	$(CARGO) build --locked --release --package tessera-judge
	testing/judge/fuzz.sh $(oracle) $(target)/release/conformance

.PHONY: fuzz-intercept
fuzz-intercept: ## Fuzz the readers of grants, ledgers and HAMi's variables (nightly Rust, cargo-fuzz): MINUTES=5 for each
	@testing/fuzz/run.sh $(or $(MINUTES),5)

.PHONY: bench-admission
bench-admission: ## Time reviews by the admission webhook, beside JSON alone
	$(CARGO) bench --locked --package tessera-admission --bench review

.PHONY: bench-day
bench-day: ## Simulate ten minutes of a large cluster with the controller's core (minutes): NODES=5000 SHARES=100000 RATE=50 SECONDS_LONG=600
	$(CARGO) build --locked --release --package tessera-judge --bin day
	$(target)/release/day --nodes $(or $(NODES),5000) --shares $(or $(SHARES),100000) --rate $(or $(RATE),50) --seconds $(or $(SECONDS_LONG),600)

.PHONY: bench-stuck
bench-stuck: ## Measure the controller's steps beside pods that get no devices until a user changes them: PODS=10000
	$(CARGO) build --locked --release --package tessera-judge --bin stuck
	$(target)/release/stuck --pods $(or $(PODS),10000)

.PHONY: bench-controller
bench-controller: ## Measure the controller on a generated cluster (minutes): NODES=5000 SHARES=10000 PODS=10000
	$(CARGO) build --locked --release --package tessera-judge
	for shapes in 1 100 1000; do \
		$(target)/release/backlog --nodes $(or $(NODES),5000) --pods $(or $(PODS),10000) --shapes $$shapes || exit 1; \
	done
	$(target)/release/scale --nodes $(or $(NODES),5000) --shares $(or $(SHARES),10000)

.PHONY: bench-day-cluster
bench-day-cluster: ## A rolling day on a real control plane with hollow nodes (root and Go; OPTIONS=--help)
	@e2e/cluster/day.sh $(OPTIONS)

.PHONY: bench-cluster
bench-cluster: ## Pods bound per second by a real control plane, beside kube-scheduler alone (root and Go; OPTIONS=--help)
	@e2e/cluster/bench.sh $(OPTIONS)

# SPDX-License-Identifier: Apache-2.0
# The commands of the README. `make` alone lists them.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# How long each fuzz target runs under `make test` and `make fuzz`.
FUZZ_SECONDS ?= 60

# Further options of `make bench-block`, for instance BENCH_BLOCK="--pairs 9 --only 'nbd raw'", or BENCH_BLOCK=--quick.
BENCH_BLOCK ?=

# Further options of `make bench-memory`, for instance BENCH_MEMORY="--max 4G --only lookups".
BENCH_MEMORY ?=

.PHONY: help demo test check unit fuzz e2e e2e-iommufd bench-exit bench-start bench-footprint bench-block bench-memory bench-passthrough stress build deps clean-cache

help: ## list these commands
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: deps build ## measure sysbench natively, under QEMU and under tare; table, target/report/index.html, report.json
	target/release/tare-lab run all --scale 0.1 --repeat 3 --budget 6 --subjects native,qemu,tare --html target/report --json target/report/report.json

test: deps ## every check and test, end-to-end ones in the lab included
	@scripts/install-deps test
	FUZZ_SECONDS=$(FUZZ_SECONDS) scripts/test

check: ## formatting, clippy, layers, sizes, unsafe code, words, dependencies
	cargo xtask check

unit: deps ## unit and property tests alone
	@scripts/install-deps test
	cargo test --workspace --locked --quiet --no-fail-fast

fuzz: ## each fuzz target for FUZZ_SECONDS (60)
	scripts/fuzz $(FUZZ_SECONDS)

e2e: deps build ## the end-to-end tests in the lab: stock kernels and user space boot, disks, many CPUs, endings, refusals
	scripts/e2e

e2e-iommufd: deps build ## the end-to-end test of passthrough by iommufd, with a kernel that it builds first (once)
	scripts/kernel-iommufd
	scripts/e2e iommufd::

stress: deps ## ten million interrupts for each controller while masks, vectors and CPUs change, counted on both sides (an hour)
	scripts/stress $(STRESS)

bench-exit: deps build ## what the ledger costs: the same exits with accounting on and off, and the ratio
	cargo build --release --locked -p machine --example exit_cost
	target/release/tare-lab host once --counted --put target/release/examples/exit_cost:/lab/bin/exit_cost exit_cost 2000

bench-start: build ## from exec to the guest's first instruction: tare beside the smallest C program, and the ratio
	cargo build --release --locked -p tare --example first_instruction
	target/release/examples/first_instruction

bench-footprint: build ## memory beside the guest's: small and large guests, the tenth machine; the promised bounds as ratios
	cargo build --release --locked -p tare --example footprint
	target/release/examples/footprint

bench-block: build ## the disk engine beside QEMU's, natively: ratios as a table, and target/bench-block.json
	@scripts/install-deps bench
	cargo build --locked -p tare --example bench_block
	target/debug/examples/bench_block --json target/bench-block.json $(BENCH_BLOCK)

bench-memory: build ## memory made ready and found, natively: preallocation and the pool beside QEMU, zeroing, lookups; ratios
	@scripts/install-deps bench
	cargo build --release --locked -p tare --example bench_memory
	cargo build --release --locked -p kvm --example harvest
	target/release/examples/bench_memory $(BENCH_MEMORY)
	target/release/examples/harvest

bench-passthrough: build ## in the lab: an NVMe disk and a network card passed through, by kind of page, tare beside QEMU; starts of 8 GiB
	target/release/tare-lab run passthrough --scale 0.03 --repeat 1 $(BENCH_PASSTHROUGH)

build: ## the release programs
	scripts/build
	@scripts/guests

deps: ## install what is missing from Debian's packages
	@scripts/install-deps build lab

clean-cache: build ## end the lab machine and remove its images
	target/release/tare-lab host down
	rm -rf "$${TARE_CACHE:-$${XDG_CACHE_HOME:-$$HOME/.cache}/tare}"

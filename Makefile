# `make demo` and `make test` each set up everything on a machine that has Python (3.10 or newer) and a Rust toolchain.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
TRAINERS := .venv-trainers
FUZZ_SECONDS ?= 300
PROOF ?= proof
# What a wheel is built from.
SOURCES := pyproject.toml Cargo.toml Cargo.lock $(shell find rust python -type f \
             -not -path '*/target/*' -not -name '*.pyc' -not -name '*.so' -not -path 'rust/fuzz/*')

.PHONY: demo test test-long test-trainers lint bench bench-peers compare proof proof-larger proof-bounded gpu reproduce loss-curves kills fuzz clean

## Show what wlb does with real documents found on this machine, writing wlb-demo/; then train on 4 processes and on one.
demo: $(VENV)/.wlb-examples
	$(BIN)/wlb demo $(DEMO_FLAGS)
	$(BIN)/python examples/same_losses.py $(LOSSES_FLAGS)

## Run the tests, all but those that take minutes.
test: $(VENV)/.wlb-test
	cargo test --locked --package wlb-core
	$(BIN)/python -m pytest

## Also the tests that take minutes, and more examples of every property.
test-long: $(VENV)/.wlb-test
	WLB_HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest -m "long or not long"

## Train inside the real trainers of others, in an environment of its own: `make test` keeps what of it is quick.
test-trainers: $(TRAINERS)/.wlb $(TRAINERS)/llamafactory $(TRAINERS)/axolotl
	$(TRAINERS)/bin/python -m pytest -m "long or not long" tests/trainers tests/torch/test_training.py tests/torch/test_verify.py $(TRAINERS_FLAGS)
	HF_HUB_OFFLINE=1 PYTHONPATH=$(TRAINERS)/llamafactory $(TRAINERS)/bin/python -m pytest tests/trainers/test_llamafactory.py $(TRAINERS_FLAGS) || [ $$? -eq 5 ]
	HF_HUB_OFFLINE=1 AXOLOTL_DO_NOT_TRACK=1 PYTHONPATH=$(TRAINERS)/axolotl $(TRAINERS)/bin/python -m pytest tests/trainers/test_axolotl.py $(TRAINERS_FLAGS) || [ $$? -eq 5 ]

## Formatting, lints, floors and circles of imports, types, stubs.
lint: $(VENV)/.wlb-test
	$(BIN)/python -m pip install --quiet '.[lint]'
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- --deny warnings
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest wlb._core

## Compare with the floor, and with the optimum; writes benches/records/ and docs/results.md. LENGTHS: .npy files for real balance.
bench: $(VENV)/.wlb-bench
	$(BIN)/python -m benches.engine $(if $(LENGTHS),--lengths $(LENGTHS))
	$(BIN)/python -m benches.refined $(if $(LENGTHS),--lengths $(LENGTHS))
	$(BIN)/python -m benches.results

## Batches that are trained in one step, beside verl's plans; writes its record. LENGTHS: .npy files for real lengths beside synthetic ones.
bench-peers: $(VENV)/.wlb-peers $(VENV)/peers
	PYTHONPATH=$(VENV)/peers $(BIN)/python -m benches.whole_batch $(if $(LENGTHS),--lengths $(LENGTHS))

## Every goal of wlb beside its peers, measured in one run; writes docs/comparison.md and its record. LENGTHS as above.
compare: $(VENV)/.wlb-peers $(VENV)/peers
	PYTHONPATH=$(VENV)/peers $(BIN)/python -m benches.compare $(if $(LENGTHS),--lengths $(LENGTHS)) $(COMPARE_FLAGS)
	$(BIN)/python -m benches.results

## A gain on a clock, and the prediction beside it: a small model trained on this machine; writes docs/proof.md, or the
## page that PROOF names. LENGTHS: one .npy.
proof: $(VENV)/.wlb-studies
	$(BIN)/python -m studies.proof $(if $(LENGTHS),--lengths $(LENGTHS)) --page docs/$(PROOF).md \
	    --picture docs/$(PROOF).png --record benches/records/$(PROOF).json $(PROOF_FLAGS)
	$(BIN)/python -m benches.results

## The same of a model that is twice as large, in 45 minutes; writes docs/proof_larger.md. LENGTHS and PROOF_FLAGS as above.
proof-larger:
	$(MAKE) proof PROOF=proof_larger PROOF_FLAGS="--hidden 192 --context 6144 --layouts pp2 --layouts dp2 \
	    --empty-sliced --batches 16 --repeats 3 $(PROOF_FLAGS)"

## Of it a part, with steps whose work is bounded, in a quarter of an hour; writes docs/proof_bounded.md.
proof-bounded:
	$(MAKE) proof PROOF=proof_bounded PROOF_FLAGS="--hidden 192 --context 6144 --layouts pp2 --empty-sliced \
	    --methods uncut --methods finer,\ 4 --batches 24 --repeats 3 $(PROOF_FLAGS)"

## What only a GPU can show, in pieces of nine minutes: run it until it exits with 0. Writes wlb-gpu/.
gpu: $(VENV)/.wlb-studies
	$(BIN)/python -m studies.gpu $(GPU_FLAGS)

## Does packing change what is learnt? A small look in wlb-losses/; LOSS_CURVES_FLAGS="--seeds 20 --batches 56" is the study.
loss-curves: $(VENV)/.wlb-studies
	$(BIN)/python -m studies.loss_curves $(LOSS_CURVES_FLAGS)

## The papers' tables and figures beside ours; writes wlb-reproduce/.
reproduce: $(VENV)/.wlb-studies
	$(BIN)/python -m studies.paper $(REPRODUCE_FLAGS)

## Kill the example trainer at 200 random moments, half of them in a save, and compare with a run that nobody killed.
kills: $(VENV)/.wlb-examples
	$(BIN)/python -m studies.trainer.kills $(KILLS_FLAGS)

## Fuzz each target for FUZZ_SECONDS; needs a nightly toolchain and `cargo install cargo-fuzz`.
fuzz:
	for target in pack packer_stream load_state shard profile dynamic_cp; do \
	    cargo +nightly fuzz run --fuzz-dir rust/fuzz $$target -- -max_total_time=$(FUZZ_SECONDS) || exit 1; \
	done

clean:
	rm -rf $(VENV) $(TRAINERS) target dist wlb-demo wlb-proof wlb-losses wlb-gpu

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(TRAINERS)/.wlb: $(SOURCES)
	$(PYTHON) -m venv $(TRAINERS)
	$(TRAINERS)/bin/python -m pip install --quiet --upgrade pip
	$(TRAINERS)/bin/python -m pip install --quiet '.[test,trainers]'
	# verl asks for whole inference engines: without what its planner does not import. Its tests are skipped without it.
	$(TRAINERS)/bin/python -m pip install --quiet tensordict ray pandas codetiming hydra-core peft dill || true
	$(TRAINERS)/bin/python -m pip install --quiet --no-deps verl || true
	# Its own tests of its planner are in no package.
	test -d $(TRAINERS)/verl || { git clone --quiet --depth 1 --filter blob:none --sparse --branch v0.9.1 https://github.com/verl-project/verl $(TRAINERS)/verl \
	    && git -C $(TRAINERS)/verl sparse-checkout set tests/utils; } || true
	# It asks for older transformers and numpy, and for the clients of every cloud.
	$(TRAINERS)/bin/python -m pip install --quiet boto3 Brotli catalogue python-snappy xxhash zstd || true
	$(TRAINERS)/bin/python -m pip install --quiet --no-deps mosaicml-streaming || true
	# `pretrain` is in no package. The path comes after the installed megatron-core.
	$(TRAINERS)/bin/python -m pip install --quiet six || true
	test -d $(TRAINERS)/Megatron-LM || git clone --quiet --depth 1 --branch core_v0.16.1 https://github.com/NVIDIA/Megatron-LM $(TRAINERS)/Megatron-LM || true
	echo $(abspath $(TRAINERS))/Megatron-LM > $$($(TRAINERS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/megatron-lm.pth
	touch $@

# Programs that want other versions of what is there: a folder each, which goes before. Its tests are skipped without it.
$(TRAINERS)/llamafactory $(TRAINERS)/axolotl: $(TRAINERS)/%: tests/trainers/%.txt | $(TRAINERS)/.wlb
	rm -rf $@
	$(TRAINERS)/bin/python -m pip install --quiet --no-deps --target $@ --requirement $< || true
	mkdir -p $@ && touch $@

# Whole training stacks that cannot be installed side by side: without what they depend on; the bench imports one file of each.
$(VENV)/peers: $(VENV)/bin/python
	for peer in axolotl llamafactory nemo-automodel nemo-toolkit verl; do \
	    $(BIN)/python -m pip install --quiet --no-deps --target $@ $$peer || true; \
	done

# What cannot be installed is missing: the benches name it.
$(VENV)/.wlb-peers: $(VENV)/bin/python $(SOURCES)
	$(BIN)/python -m pip install --quiet '.[peers]' || $(BIN)/python -m pip install --quiet '.[bench]'
	touch $@

# A wheel, not an editable install: a stale library beside the sources would win over a fresh build.
$(VENV)/.wlb-%: $(VENV)/bin/python $(SOURCES)
	$(BIN)/python -m pip install --quiet '.[$*]'
	touch $@

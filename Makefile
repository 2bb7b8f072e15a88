# Every target sets up what it needs from nothing, in ./.venv and ./build, and is quick when nothing
# changed. `make demo` and `make test` are all that a stranger has to know.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check -q
# Without make's flags: they offer ninja a job server that it cannot use, which it calls an error.
CMAKE := PATH="$(CURDIR)/$(BIN):$$PATH" MAKEFLAGS= $(BIN)/cmake
NATIVE_SOURCES := $(shell find native -name '*.cc' -o -name '*.h' -o -name '*.cmake' -o -name CMakeLists.txt)
CXX_FILES := $(shell find native -name '*.cc' -o -name '*.h')
SANITIZERS := address undefined thread
TRAINING_TESTS := ddp ranks torch_backend
PYTEST_PARTS := pytest-training pytest-stores pytest-rest

.PHONY: install extension demo test check doctest test-ecosystem native-test native-plain native-aarch64 bench format clean \
  $(SANITIZERS:%=native-%) $(PYTEST_PARTS)

install: .venv/.installed

demo: install
	$(BIN)/gradsync run -n 2 examples/digits.py

test: install
	$(MAKE) -j2 --output-sync=target check native-plain
	$(MAKE) -j2 --output-sync=target $(PYTEST_PARTS) doctest

# Style, types, and the laws of the code: who may import whom, sizes, docs that run.
check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/mypy
	$(BIN)/pytest -q tests/meta

# Side by side: training, and the rest after stores, whose tests mostly wait. Of the ecosystem what
# needs no further library.
pytest-training: PARTS := $(TRAINING_TESTS)
pytest-stores: PARTS := stores
pytest-stores: OPTIONS := -n 3
pytest-rest: PARTS := $(filter-out __pycache__ meta ecosystem stores $(TRAINING_TESTS), $(patsubst tests/%/,%,$(wildcard tests/*/))) \
  ecosystem/test_torch_launchers.py

$(PYTEST_PARTS): install
	$(BIN)/pytest -q --durations=15 $(OPTIONS) $(PARTS:%=tests/%)

doctest: install
	$(BIN)/pytest -q --doctest-modules src/gradsync

# Accelerate, transformers and Lightning on torch.distributed's backend "gradsync", and torch's own
# test base for process groups. Not part of "test": the libraries are large.
test-ecosystem: install
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[ecosystem]'
	$(BIN)/pytest -q tests/ecosystem
	$(BIN)/python tools/torch_suite.py

# The C++ tests: plain, under the three sanitizers, and on 64-bit Arm.
native-test: native-plain $(SANITIZERS:%=native-%) native-aarch64

# In the tree of the extension, so that the core is compiled once; its name holds Python's version.
native-plain: install
	$(CMAKE) --build build/cp* --target native_tests
	$(BIN)/ctest --test-dir build/cp* --output-on-failure

$(SANITIZERS:%=native-%): native-%: .venv/.deps
	$(CMAKE) -S native -B build/$@ -G Ninja -DGRADSYNC_EXTENSION=OFF \
	  -DGRADSYNC_SANITIZE=$* >/dev/null
	$(CMAKE) --build build/$@ --target native_tests
	$(BIN)/ctest --test-dir build/$@ --output-on-failure

native-aarch64: .venv/.deps
	@command -v aarch64-linux-gnu-g++ qemu-aarch64 >/dev/null || \
	  (apt-get update -q && apt-get install -qy g++-aarch64-linux-gnu qemu-user)
	$(CMAKE) -S native -B build/$@ -G Ninja -DGRADSYNC_EXTENSION=OFF \
	  -DCMAKE_TOOLCHAIN_FILE=$(CURDIR)/native/aarch64.cmake >/dev/null
	$(CMAKE) --build build/$@ --target native_tests
	$(BIN)/ctest --test-dir build/$@ --output-on-failure

bench: install
	mkdir -p build/bench
	$(BIN)/python benchmarks/stores.py --out build/bench/stores.json
	$(BIN)/python benchmarks/testkit.py --out build/bench/testkit.json
	$(BIN)/python benchmarks/ddp_step.py --out build/bench/ddp_step.json --plot build/bench/ddp_step.svg
	$(PIP) install -c constraints.txt matplotlib numpy rich
	$(BIN)/python benchmarks/collectives.py --out build/bench/collectives.json

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

clean:
	rm -rf .venv build

.venv/.deps: constraints.txt pyproject.toml
	@command -v g++ >/dev/null || (apt-get update -q && apt-get install -qy g++)
	$(PYTHON) -m venv .venv
	$(PIP) install -c constraints.txt scikit-build-core nanobind cmake ninja
	touch $@

# An editable install: Python from src/ (it knows the top-level modules by name), the extension built
# incrementally in build/. Meanwhile what it needs is fetched and unpacked, which takes as long.
# Compiled ahead, because not every environment lets Python keep what it compiled: 0.15 s a process.
.venv/.installed: .venv/.deps $(NATIVE_SOURCES) $(wildcard src/gradsync/*.py)
	$(MAKE) -j2 --output-sync=target .venv/.requirements extension
	$(BIN)/python -m compileall -q src
	touch $@

.venv/.requirements: .venv/.deps
	$(BIN)/python tools/requirements.py dev > $@.txt
	$(PIP) install -c constraints.txt -r $@.txt
	touch $@

extension: .venv/.deps
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) install --no-deps --no-build-isolation -e .

# Every target sets up what it needs from nothing, in ./.venv and ./build, and is quick when nothing changed.
PYTHON ?= python3
BIN := .venv/bin
NATIVE := $(shell find native -name '*.cc' -o -name '*.h' -o -name CMakeLists.txt)
CMAKE := $(BIN)/cmake
CTEST := $(BIN)/ctest --output-on-failure

.PHONY: all install
all: install
install: .venv/.installed

.venv/.deps: constraints.txt pyproject.toml
	@command -v g++ >/dev/null || (apt-get update -q && apt-get install -qy g++)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt scikit-build-core nanobind cmake ninja
	touch $@

# An editable install: Python from src/, the extension built incrementally in build/.
.venv/.installed: .venv/.deps pyproject.toml $(NATIVE)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

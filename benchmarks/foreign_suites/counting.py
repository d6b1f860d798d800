"""A pytest plugin that counts cases and functions: a function passes if all its cases do.

Skipped cases are not counted. The last lines are `N of M functions, P of Q cases` and the failed functions.
"""

from __future__ import annotations

import pytest


class Counting:
    """Outcomes of one run."""

    def __init__(self) -> None:
        self.failures: dict[str, str] = {}
        """Case -> its error's first line, "" if it passed."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the outcome of a case; a failed set-up fails it."""
        if report.failed or (report.when == "call" and not report.skipped):
            crash = getattr(report.longrepr, "reprcrash", None)
            text = (crash.message if crash is not None else str(report.longrepr)) if report.failed else ""
            self.failures[report.nodeid] = self.failures.get(report.nodeid) or text.strip().partition("\n")[0][:160]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the counts."""
        functions: dict[str, str] = {}
        for case, error in self.failures.items():
            name = case.partition("[")[0]
            functions[name] = functions.get(name) or error
        for name, error in functions.items():
            if error:
                terminalreporter.write_line(f"FAILED {name}: {error}")
        (good, whole), (passed, cases) = (
            (sum(not error for error in part.values()), len(part)) for part in (functions, self.failures)
        )
        terminalreporter.write_line(f"{good} of {whole} functions, {passed} of {cases} cases")


def pytest_configure(config: pytest.Config) -> None:
    """Register the counts."""
    config.pluginmanager.register(Counting())

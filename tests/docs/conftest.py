"""What several tests of the documentation share."""

from __future__ import annotations

from tests.web.conftest import browser, context  # noqa: F401  (fixtures)

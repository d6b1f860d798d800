"""Asynchronous tests run as those of the server do."""

from __future__ import annotations

from tests.server.conftest import pytest_pyfunc_call as pytest_pyfunc_call

"""A Ray cluster for one file of tests."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a Ray cluster with four CPUs, which this process has joined."""
    ray = pytest.importorskip("ray", reason="needs Ray (pip install '.[ray]')")
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as directory:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray announces future defaults
            context = ray.init(
                address="local",
                num_cpus=4,
                include_dashboard=False,
                object_store_memory=100 << 20,
                _node_ip_address="127.0.0.1",
                _temp_dir=directory,
                logging_level=logging.ERROR,
                log_to_driver=False,
            )
        yield context.address_info["gcs_address"]
        ray.shutdown()

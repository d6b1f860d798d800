"""The series of /metrics before the first request: name, type, labels."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families

from nano_inference.server.metrics import Metrics


def metrics() -> Iterator[str]:
    """Return a line for each series; the values of labels that name a model or a machine are left out."""
    text = Metrics(model_name="m", num_blocks=8, block_size=16, cache_config={}).render().decode()
    for family in text_string_to_metric_families(text):
        labels = sorted({name for sample in family.samples for name in sample.labels} - {"le"})
        if not family.name.startswith("process_"):  # of the metrics library, and only where the system has /proc
            yield f"{family.name} {family.type} {','.join(labels)}"

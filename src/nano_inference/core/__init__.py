"""One step of an engine: plan (`scheduler`), apply, run and commit (`core`), on sequences and blocks. No torch."""

"""One step: plan, apply, run, commit. No torch."""

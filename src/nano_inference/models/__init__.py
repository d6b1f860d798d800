"""Model families: a `ModelConfig` becomes a `Program`, a list of operations. No torch, except in `rope`."""

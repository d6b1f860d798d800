"""nano-inference: an exact, fast and readable LLM inference engine."""

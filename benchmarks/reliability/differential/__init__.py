"""Random histories of the engine on tiny random models, and the oracle that checks every number: see fuzz_engine.py."""

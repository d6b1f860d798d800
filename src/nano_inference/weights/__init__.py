"""New weights for a running engine: gathered in a second memory, checked, then exchanged for the old ones as a whole.

`staging` gathers and checks, `sync` owns the thread and the exchange; `directory` and `group` are places where weights
come from, each nothing but an iterator of (Hugging Face name, tensor).
"""

"""New weights for a running engine: packed beside those in force, checked, then exchanged as a whole.

`staging` gathers and checks, `sync` owns the thread and the exchange; `directory` and `group` are places where weights
come from, each nothing but an iterator of (Hugging Face name, tensor).
"""

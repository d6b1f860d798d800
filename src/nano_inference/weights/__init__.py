"""Weight updates of a running engine: weights are staged next to the current ones, checked, then swapped atomically.

`updates` has the arguments of an update, without torch. `staging` checks and packs, `sync` owns the staging thread and
the swap. `directory`, `group` and `plain` are sources: iterators of (Hugging Face name, tensor).
"""

"""Weight updates of a running engine: weights are staged next to the current ones, checked, then swapped atomically.

`updates` has the record of an update, without torch. `staging` checks and packs, `sync` owns the staging thread and the
swap. `directory`, `group`, `plain`, `nccl`, `state_dicts` and `shared_tensors` are sources: iterators of (Hugging Face
name, tensor).
"""

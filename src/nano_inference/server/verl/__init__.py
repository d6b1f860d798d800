"""An engine as a rollout backend of verl (0.9.1): `actor_rollout_ref.rollout.name=nano_inference`.

`replica.py` starts a Ray actor for each replica, `server.py` is what runs in it, and `rollout.py` sends it the
trainer's weights. `plugin.py` makes them known to verl, which imports it through the entry point `verl.plugins` in
every process, so they are imported when they are used. verl and Ray are imported in functions.
"""

from __future__ import annotations

NAME = "nano_inference"  # of the backend, in `rollout.name`, `rollout.engine_kwargs` and the names of actors

"""One rollout engine made of several: requests are divided among workers, weights change in all of them or in none.

`pool` has the interface, `members` places jobs and replaces dead workers, `updates` installs weights. A `Fleet`
(`worker`) opens the workers: engines in this process (`local`), Ray actors (`ray_workers`) or HTTP servers (`urls`).
"""

"""Golden replies: what a served model answers to fixed requests of every dialect, whole and streamed.

    python -m tests.goldens --rewrite    asks a server of this tree and writes replies/*.json anew

`cases.py` has the requests, `replies/` a file for each dialect, `deviations.md` the reason of each file that was
written anew. Ids and times are masked, numbers are compared to 1e-4, and adjacent deltas of a stream with the same form
count as one. Requests go to `nano-inference serve` processes, so nothing here depends on the code's structure.
"""

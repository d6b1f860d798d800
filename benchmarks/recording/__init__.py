"""What ab.py compares: checkpoints, requests, the recording program, streams of tokens."""

"""Torch: any program on any device; the reference for all other executors."""

"""Tensor parallelism: one engine whose forward pass is divided among several processes (ranks)."""

"""Adapters for programs of others that generate with an engine in their own process."""

"""Adapters for programs of others that generate with an engine."""

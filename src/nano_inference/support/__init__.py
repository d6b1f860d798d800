"""Errors, checks, files, processes, plugins and memory: what every room uses."""

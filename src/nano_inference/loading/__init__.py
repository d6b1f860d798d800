"""Reads model files: a `Checkpoint` holds the configuration, the tokenizer's location and named weight sources.

Nothing here runs code from a file: pickles are refused, lengths are checked before use, and every error is a
`ModelError` naming the file.
"""

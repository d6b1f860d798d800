"""From a model's name to its files and named tensors.

`catalog` finds files, which `downloads` fetches. `checkpoint` reads them: a `Checkpoint` holds the configuration,
the tokenizer's location and named weight sources. Nothing here runs code from a file: pickles are refused, lengths are
checked before use, and every error is a `ModelError` naming the file.
"""

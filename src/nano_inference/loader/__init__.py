"""Turns a model's files into a configuration, a tokenizer's whereabouts and named weights; `load_into` is the one door.

A reader of one file format knows nothing of the model that will be built; whoever built it says where each Hugging
Face name belongs. Nothing here runs code found in a file: pickles are refused, every length is checked before it is
believed, and whatever is wrong is a `ModelError` naming the file.
"""

"""Compares this package with the code of any commit of karpathy/nanochat (`__main__`)."""

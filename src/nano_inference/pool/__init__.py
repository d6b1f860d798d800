"""Several engines as one: routing by prefix, updates that all install together, replacement of lost engines."""

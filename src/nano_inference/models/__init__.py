"""Decoders. `config` says what one is made of and imports no torch; `build` makes it; a new family is one file."""

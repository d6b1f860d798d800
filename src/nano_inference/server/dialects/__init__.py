"""The dialects of this package, a file or some files of one prefix each; `server/wiring.py` lists their rows."""

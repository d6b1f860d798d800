"""The built-in dialects: one module each, or several with a common prefix. `server/wiring.py` lists them."""

"""One URL for several engines: a proxy that routes by prefix, and the processes behind it. Imports neither torch nor
Ray."""

"""Several models behind one address: each has its own server process, started when a request names the model."""

"""`rl-check`: what a trainer may rely on in a rollout server, tested over HTTP in vLLM's or SGLang's dialect."""

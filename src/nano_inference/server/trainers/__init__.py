"""Routes for trainers: pause, abort, sleep and weight updates, under vLLM's paths and under SGLang's.

`vllm` and `sglang` are tables of commands (path, body, call, reply), `facts` one of questions; `routes` mounts them.
Their calls reach the engine by `control`, `updates` and `groups`, which `context` has.
"""

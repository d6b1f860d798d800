"""Routes for trainers: pause, abort, sleep and weight updates, under vLLM's paths and under SGLang's.

`control` and `updates` implement the commands on the event loop through `EngineLink`; `vllm`, `sglang` and `facts` map
paths and bodies to them; `routes` assembles the routes.
"""

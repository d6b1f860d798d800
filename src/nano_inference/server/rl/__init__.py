"""What a trainer needs of a server: pause, abort, new weights, and their version; in vLLM's words and in SGLang's.

`control` and `updates` do it, on the event loop, through the bridge; `vllm`, `sglang` and `facts` are thin dialects
over them; `routes` puts the paths together.
"""

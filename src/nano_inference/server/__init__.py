"""The HTTP server: OpenAI's API in front of one engine. Only `load`, which loads a model, imports torch.

`run` is the process, `protocol` and `guard` refuse invalid and unauthorised requests, `app` has the routes. `pipeline`
answers a request: `body`, `schema`, `prompts` and `ask` turn JSON into a `Generation`; `detokenizer`, `transcript` and
`replies` turn deltas into JSON. `engine_link` owns the engine; a coroutine on the event loop awaits the deltas.
"""

"""The HTTP server: OpenAI's API in front of one engine. Only `load`, which loads a model, imports torch.

`run` is the process, `protocol` and `guard` refuse invalid and unauthorised requests, `app` has the routes. `body`,
`schema`, `fields`, `prompts` and `calls` turn JSON into engine requests; `detokenizer`, `replies` and `answering`
turn deltas into JSON. `engine_link` owns the engine; a coroutine on the event loop awaits its call's deltas.
"""

"""The HTTP server: OpenAI's interface in front of one engine. No torch, but where `opening` loads a model.

`run` is the process, `protocol` and `guard` keep out what must not come in, `app` has the routes. `body`, `schema`,
`unsupported`, `prompts` and `calls` turn JSON into engine requests; `writing`, `replies` and `answering` turn deltas
into JSON. `link` owns the engine's thread; coroutines stand outside and wait with a `ticket`.
"""

"""The HTTP server: OpenAI's interface in front of one engine. No torch.

`bridge` owns the engine's thread; coroutines stand outside. `schema` and `calls` turn JSON into engine requests,
`replies` and `stream` turn deltas into JSON, `guard` and `protocol` keep out what must not come in, `app` has the
routes and `run` the process.
"""

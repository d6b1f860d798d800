"""Routes of OpenAI's POST /v1/completions, /v1/chat/completions and /v1/embeddings.

Bodies are in `server/schema.py`, calls in `server/calls.py` and replies in `server/replies.py`; those of embeddings in
`server/embedding.py`.
"""

from __future__ import annotations

from nano_inference.server.calls import chat_call, completion_call
from nano_inference.server.dialect import Dialect, Generating
from nano_inference.server.embedding import EmbeddingBody, embedding_call
from nano_inference.server.schema import ChatBody, CompletionBody

DIALECT = Dialect(
    generating=(
        Generating(
            path="/v1/completions",
            body=CompletionBody,
            to_call=completion_call,
            summary="Continue a text or token ids.",
        ),
        Generating(
            path="/v1/chat/completions", body=ChatBody, to_call=chat_call, summary="Answer messages.", renders=True
        ),
    ),
)

EMBEDDINGS = Dialect(
    generating=tuple(
        Generating(
            path=path,
            body=EmbeddingBody,
            to_call=embedding_call,
            summary="Return embedding vectors of texts.",
            streams=False,
        )
        for path in ("/v1/embeddings", "/embeddings")
    ),
)

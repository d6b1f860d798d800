"""Routes of OpenAI's POST /v1/completions, /v1/chat/completions and /v1/embeddings.

`server/schema.py` has their bodies, `server/ask.py` what these ask for, `server/replies.py` the replies, and
`server/embedding.py` all of embeddings.
"""

from __future__ import annotations

from nano_inference.server.ask import ask_chat, ask_completion
from nano_inference.server.dialect import Dialect, Route
from nano_inference.server.embedding import EmbeddingBody, EmbeddingReply, ask_embedding
from nano_inference.server.schema import ChatBody, CompletionBody

DIALECT = Dialect(
    generating=(
        Route(
            path="/v1/completions",
            body=CompletionBody,
            ask=ask_completion,
            summary="Continue a text or token ids.",
        ),
        Route(path="/v1/chat/completions", body=ChatBody, ask=ask_chat, summary="Answer messages.", renders=True),
        *(
            Route(
                path=path,
                body=EmbeddingBody,
                ask=ask_embedding,
                reply=EmbeddingReply,
                summary="Return embedding vectors of texts.",
                streams=False,
            )
            for path in ("/v1/embeddings", "/embeddings")
        ),
    ),
)

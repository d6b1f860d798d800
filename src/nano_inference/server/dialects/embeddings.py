"""Routes of OpenAI's POST /v1/embeddings; body, call and reply are in `server/embedding.py`."""

from __future__ import annotations

from nano_inference.server.dialect import Dialect, Generating
from nano_inference.server.embedding import EmbeddingBody, embedding_call

DIALECT = Dialect(
    generating=(
        Generating(
            path="/v1/embeddings",
            body=EmbeddingBody,
            to_call=embedding_call,
            summary="Return embedding vectors of texts.",
            streams=False,
        ),
    ),
)

"""OpenAI's POST /v1/embeddings, and /embeddings as in llama.cpp; body, call and reply are in `server/embedding.py`."""

from __future__ import annotations

from nano_inference.server.dialect import Dialect, Generating
from nano_inference.server.embedding import EmbeddingBody, embedding_call

DIALECT = Dialect(
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

"""POST /invocations of Amazon SageMaker's containers: a chat, a completion or embeddings, by the fields of the body.

The same route of vLLM: vllm/entrypoints/serve/sagemaker/api_router.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from nano_inference.server.calls import chat_call, completion_call
from nano_inference.server.dialect import Dialect, Generating
from nano_inference.server.embedding import EmbeddingBody, embedding_call
from nano_inference.server.errors import ApiError
from nano_inference.server.model import ServedModel
from nano_inference.server.schema import ChatBody, CompletionBody

_PATH = "/invocations"
_ROUTES: Mapping[str, Generating] = MappingProxyType(
    {
        "messages": Generating(path=_PATH, body=ChatBody, to_call=chat_call, summary="Answer messages.", renders=True),
        "prompt": Generating(path=_PATH, body=CompletionBody, to_call=completion_call, summary="Continue a text."),
        "input": Generating(
            path=_PATH, body=EmbeddingBody, to_call=embedding_call, summary="Return embeddings.", streams=False
        ),
    }
)
"""Field -> the route of bodies that have it."""


def choose(body: Mapping[str, Any], model: ServedModel) -> Generating:
    """Return the route of a body. Raises `ApiError` unless it has the field of exactly one; null is none."""
    given = [name for name in _ROUTES if body.get(name) is not None]
    if len(given) != 1:
        names = ", ".join(_ROUTES)
        raise ApiError(400, f"the body must have exactly one of {names}; it has {', '.join(given) or 'none'}")
    return _ROUTES[given[0]]


DIALECT = Dialect(
    generating=(
        Generating(
            path=_PATH,
            body=ChatBody,
            to_call=chat_call,
            summary="Answer messages, continue a prompt or embed an input, as on SageMaker.",
            renders=True,
            choose=choose,
        ),
    ),
)

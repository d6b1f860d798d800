"""Connects the server's core with the dialects and the RL routes, which the core does not import."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from nano_inference.server import guard
from nano_inference.server.app import App
from nano_inference.server.config import ServerConfig
from nano_inference.server.dialect import DIALECTS_GROUP, Dialect
from nano_inference.server.dialects import (
    generate,
    llamacpp,
    messages,
    ollama,
    openai,
    responses,
    sglang,
    tokens,
)
from nano_inference.server.engine_link import EngineLink
from nano_inference.server.guard import GuardPolicy
from nano_inference.server.reply_store import ReplyStore
from nano_inference.server.security import KeyRing
from nano_inference.server.trainers.routes import ADMIN_PATHS, STREAM_PATHS, rl_routes
from nano_inference.support.plugins import table

OWN_DIALECTS: Mapping[str, Dialect] = {
    "openai": openai.DIALECT,
    "responses": responses.DIALECT,
    "messages": messages.DIALECT,
    "generate": generate.DIALECT,
    "sglang": sglang.DIALECT,
    "llamacpp": llamacpp.DIALECT,
    "ollama": ollama.DIALECT,
    "embeddings": openai.EMBEDDINGS,
    "tokens": tokens.DIALECT,
}
"""The dialects of this package."""


def installed_dialects() -> Mapping[str, Dialect]:
    """Return the dialects of this package and of all installed ones, by name. Raises `PluginError`."""
    return table(DIALECTS_GROUP, OWN_DIALECTS, Dialect)


def guard_policy(config: ServerConfig, keys: KeyRing) -> GuardPolicy:
    """Return `guard.policy_of` with the RL routes as admin paths. Raises `ValueError`."""
    return guard.policy_of(config, keys, ADMIN_PATHS, STREAM_PATHS)


def make_app(config: ServerConfig, policy: GuardPolicy, link: EngineLink, dialects: Mapping[str, Dialect]) -> App:
    """Return the application with these dialects, the RL routes and an empty store of replies.

    Raises `PluginError` for a route that is defined twice.
    """
    replies = ReplyStore(config.max_stored_replies, config.max_stored_bytes, config.max_body_bytes)
    further = partial(rl_routes, link, config, policy)
    return App(config, policy, link, dialects, further, replies)

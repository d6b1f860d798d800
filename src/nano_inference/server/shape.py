"""What a reply shows of each sample: read by whoever writes samples down and by whoever shapes replies."""

from __future__ import annotations

from dataclasses import dataclass

from nano_inference.server.tools import ToolUse
from nano_inference.text.kinds import Tool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyShape:
    """What a reply shows of each sample."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    drop_space: bool = False
    """A text begins here: SentencePiece's first space is none of its own."""
    logprobs: int | None = None
    """Alternatives of each token; None shows no log-probabilities."""
    prompt_logprobs: int | None = None
    echo: tuple[str, ...] = ()
    """For each prompt the text to put before its answers; empty when nothing is."""
    echo_logprobs: bool = False
    token_ids: bool = False
    """Show ids, and with them what is known of each token: the loss mask, the weights it was drawn with."""
    tokens_as_ids: bool = False
    versions: bool = False
    """Show the weights that tokens were drawn with, whether ids are shown or not."""
    functions: ToolUse | None = None
    """The functions whose calls are looked for in the text."""
    markers: frozenset[int] = frozenset()
    """Special tokens that are shown all the same: calls are known by them."""
    tool: Tool | None = None
    """What answers while the model writes."""
    prefix_bytes: bytes = b""
    """What a reader sees of the tokens that the answer began with, marks of the calculator included."""
    prefix_ids: tuple[int, ...] = ()
    raw_logprobs: bool = False
    sampling_masks: bool = False

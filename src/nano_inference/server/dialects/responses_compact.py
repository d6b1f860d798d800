"""The reply of POST /v1/responses/compact: the user's messages, and a summary that the model wrote of the rest."""

from __future__ import annotations

from collections.abc import Sequence

from nano_inference.server.call import JSON, Call, Reply, Transcript
from nano_inference.server.detokenizer import DecodedDelta
from nano_inference.server.dialects.responses_stream import response_usage
from nano_inference.server.dialects.responses_summary import encoded
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.text.tool_events import Content

SUMMARY_TOKENS = 1024
"""Most tokens of a summary."""
REQUEST = (
    "Summarize the conversation above for someone who has to continue it without reading it: what was asked and "
    "decided, what was done and found, and what is still open. Answer with the summary only."
)
"""The message that asks the model for a summary."""


class CompactReply(Reply):
    """The reply to one call of POST /v1/responses/compact."""

    def __init__(self, call: Call, tokenizer: Tokenizer, created: int, *, kept: Sequence[JSON], id_stem: str) -> None:
        """`kept`: items that precede the summary; `id_stem`: part of its id."""
        self._call = call
        self._created = created
        self._kept = kept
        self._id_stem = id_stem

    def body(self, transcripts: Sequence[Transcript]) -> JSON:
        (transcript,) = transcripts
        text = "".join(event.text for event in transcript.events if isinstance(event, Content))
        summary = {"id": f"cmp_{self._id_stem}", "type": "compaction", "encrypted_content": encoded(text)}
        return {
            "id": self._call.id,
            "object": "response.compaction",
            "created_at": self._created,
            "output": [*self._kept, summary],
            "usage": response_usage(self._call, transcript),
        }

    def delta_events(self, transcript: Transcript, decoded: DecodedDelta, transcripts: Sequence[Transcript]) -> bytes:
        return b""  # no request of this route is a stream


def with_request(messages: Sequence[JSON]) -> list[JSON]:
    """Return a chat's messages with the request for a summary; it becomes part of a last message of the user's.

    Some chat templates refuse two messages of one role in sequence.
    """
    asking: JSON = {"role": "user", "content": [{"type": "text", "text": REQUEST}]}
    if not messages or messages[-1]["role"] != "user":
        return [*messages, asking]
    last = messages[-1]
    content = [{"type": "text", "text": last["content"]}] if isinstance(last["content"], str) else last["content"]
    return [*messages[:-1], {**last, "content": [*content, *asking["content"]]}]


def kept_messages(items: Sequence[JSON]) -> list[JSON]:
    """Return what compaction keeps of a conversation: the developer's messages, and one with the user's texts."""
    messages = [item for item in items if item["type"] == "message"]
    kept = [item for item in messages if item.get("role") in ("system", "developer")]
    users = [item for item in messages if item.get("role") == "user"]
    if not users:
        return kept
    return [*kept, {**users[0], "content": [part for item in users for part in item["content"]]}]

"""`ReplyStore`: replies that clients refer to later, in memory, within limits of number and bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from nano_inference.server.errors import ApiError

_OVERHEAD = 512  # bytes of a stored reply in addition to its two texts: objects, keys, links

Owner = int | None  # index of the API key that a reply belongs to; None on a server without keys


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredReply:
    """One reply and what it answered, each as JSON."""

    id: str
    reply: bytes
    items: bytes  # the items of the whole conversation before the reply

    @property
    def size(self) -> int:
        return len(self.reply) + len(self.items) + len(self.id) + _OVERHEAD


@dataclass(slots=True)
class _Shelf:
    replies: OrderedDict[str, StoredReply] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class ReplyStore:
    """Owns the stored replies of all clients. Methods may be called from any thread.

    Beyond a limit, the oldest reply of the owner that has most of what is limited is removed: a busy client cannot
    remove the few replies of another one.
    """

    def __init__(self, max_replies: int, max_bytes: int, max_reply_bytes: int) -> None:
        """`max_reply_bytes`: limit on one reply with its conversation, which a later request reads again."""
        self._max_replies = max_replies
        self._max_bytes = max_bytes
        self._max_reply_bytes = min(max_bytes, max_reply_bytes)
        self._lock = threading.Lock()
        self._shelves: dict[Owner, _Shelf] = {}
        self._num = 0
        self._num_bytes = 0

    def find(self, owner: Owner, name: str) -> StoredReply | None:
        with self._lock:
            shelf = self._shelves.get(owner)
            return None if shelf is None else shelf.replies.get(name)

    def put(self, owner: Owner, stored: StoredReply) -> bool:
        """Store a reply; return False if it does not fit."""
        with self._lock:
            self._remove(owner, stored.id)
            if self._max_replies < 1 or stored.size > self._max_reply_bytes:
                return False
            shelf = self._shelves.setdefault(owner, _Shelf())
            shelf.replies[stored.id] = stored
            self._num, self._num_bytes = self._num + 1, self._num_bytes + stored.size
            shelf.num_bytes += stored.size
            shelves = self._shelves
            while (are_many := self._num > self._max_replies) or self._num_bytes > self._max_bytes:
                sizes = {one: len(own.replies) if are_many else own.num_bytes for one, own in shelves.items()}
                largest = max(sizes, key=sizes.__getitem__)
                self._remove(largest, next(iter(shelves[largest].replies)))  # its oldest
            return owner in self._shelves and stored.id in self._shelves[owner].replies

    def remove(self, owner: Owner, name: str) -> bool:
        """Remove an owner's reply; return False if there is none."""
        with self._lock:
            return self._remove(owner, name)

    def _remove(self, owner: Owner, name: str) -> bool:
        shelf = self._shelves.get(owner)
        stored = None if shelf is None else shelf.replies.pop(name, None)
        if shelf is None or stored is None:
            return False
        self._num, self._num_bytes = self._num - 1, self._num_bytes - stored.size
        shelf.num_bytes -= stored.size
        if not shelf.replies:
            del self._shelves[owner]
        return True


@dataclass(frozen=True, slots=True)
class ClientReplies:
    """One client's part of the store: finds no replies of other clients."""

    store: ReplyStore
    owner: Owner

    def size_of(self, name: str) -> int:
        """Return the bytes of a reply, 0 if there is none."""
        found = self.store.find(self.owner, name)
        return 0 if found is None else found.size

    def get(self, name: str, param: str, code: str) -> StoredReply:
        """Return a reply. Raises `ApiError` 404 naming `param` if there is none."""
        stored = self.store.find(self.owner, name)
        if stored is None:
            raise _missing(name, param, code)
        return stored

    def put(self, stored: StoredReply) -> bool:
        return self.store.put(self.owner, stored)

    def remove(self, name: str, param: str, code: str) -> None:
        """Remove a reply. Raises `ApiError` 404 naming `param` if there is none."""
        if not self.store.remove(self.owner, name):
            raise _missing(name, param, code)


def _missing(name: str, param: str, code: str) -> ApiError:
    text = f"{param}: no reply {name[:200]!r} is stored; it was not stored, was deleted, or made room for later ones"
    return ApiError(404, text, param=param, code=code)

"""Two small memories that reconcilers of liveness share: what was announced, what waits for sight.

Both are this process's own; a new leader announces a clock that still disagrees once more, which
the event series absorbs. Neighbours: `federatedcluster` and `heartbeat`.
"""

from __future__ import annotations

from datetime import timedelta

from llmkube.informers.queue import WorkQueue
from llmkube.informers.view import View
from llmkube.reconcilers.book import LivenessBook


class Announced:
    """The senders whose clock skew has been announced, until it ends: a UID for each key of
    `book`, as long as that knows the sender."""

    __slots__ = ("_book", "_uids")

    def __init__(self, book: LivenessBook) -> None:
        self._book = book
        self._uids: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._uids)

    def has(self, key: str, uid: str) -> bool:
        return self._uids.get(key) == uid

    def note(self, key: str, uid: str, skewed: bool) -> None:
        """The sender's clock was found skewed, and that was announced; or it is right again."""
        known = self._book.get(key)
        if known is None or known.uid != uid:
            return  # it went, or was re-created, while that was written
        if skewed:
            self._uids[key] = uid
        else:
            self._uids.pop(key, None)

    def forget(self, key: str) -> None:
        """The sender is gone."""
        self._uids.pop(key, None)


class Deferred:
    """Keys that were decided while we were blind and have no timer: they run when sight returns."""

    def __init__(self, queue: WorkQueue, view: View) -> None:
        self._queue = queue
        self._view = view
        self._keys: set[str] = set()
        view.add_listener(self._sight_changed)

    def note(self, key: str, wake_at: timedelta | None, *, blind: bool) -> None:
        """A decision about `key` was carried out; it is to be woken then, or never.

        `blind`: our sight was down when it was made. It may have returned since.
        """
        if wake_at is not None or not blind:
            return
        if self._is_blind(key):
            self._keys.add(key)
        else:
            self._queue.add(key)

    def _sight_changed(self) -> None:
        for key in [key for key in self._keys if not self._is_blind(key)]:
            self._keys.discard(key)
            self._queue.add(key)

    def _is_blind(self, key: str) -> bool:
        return self._view.sight_of(key).down_since is not None

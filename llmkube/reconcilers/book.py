"""The liveness book: what this process has seen of every sender of stamps, by object.

Informer handlers write it, in leaders and followers alike, so that a failover is not blind;
reconcilers and collectors read it. It is memory only: after a start everything is at first sight
again, which is what the calm after a start is for (`rules.calm`). Neighbour: `rules.liveness`.
"""

from __future__ import annotations

from llmkube.api.cached import Identity
from llmkube.clock import Now
from llmkube.informers.guard import parse_version
from llmkube.rules.liveness import Record, Sighting, Trust, observe


class LivenessBook:
    """Records by key. All methods are cheap and belong to the event loop's thread."""

    __slots__ = ("_ahead", "_records", "trust")

    def __init__(self, trust: Trust) -> None:
        self.trust = trust
        self._records: dict[str, Record] = {}
        self._ahead: dict[str, tuple[str, int]] = {}
        # UID and version of what was read live, until the watch has caught up with it

    def observe(self, meta: Identity, sighting: Sighting, now: Now) -> Record | None:
        """Fold in what a list or a watch showed; return the record, None without any stamp.

        What is older than a live read is no sighting: else the stamps between the cache and the
        live read, delivered late, would look like a clock that stepped back.
        """
        key = meta.key
        if self._ahead and (ahead := self._ahead.get(key)) is not None:
            if ahead[0] == meta.uid and parse_version(meta.resource_version) < ahead[1]:
                return self._records.get(key)
            del self._ahead[key]
        return self._fold(key, sighting, now)

    def observe_live(self, meta: Identity, sighting: Sighting, now: Now) -> Record | None:
        """Fold in what a live read showed, which is as new as can be."""
        self._ahead[meta.key] = (meta.uid, parse_version(meta.resource_version))
        return self._fold(meta.key, sighting, now)

    def _fold(self, key: str, sighting: Sighting, now: Now) -> Record | None:
        old = self._records.get(key)
        new = observe(old, sighting, now, self.trust)
        if new is None:
            self._records.pop(key, None)  # another object by that name, without a stamp
        elif new is not old:
            self._records[key] = new
        return new

    def get(self, key: str) -> Record | None:
        """What is known of the sender, or None."""
        return self._records.get(key)

    def forget(self, key: str) -> None:
        """The object is gone: should it return, it is at first sight again."""
        self._records.pop(key, None)
        self._ahead.pop(key, None)

    def __len__(self) -> int:
        return len(self._records)

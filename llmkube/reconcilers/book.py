"""The liveness book: what this process has seen of every sender of stamps, by object.

Informer handlers write it, in leaders and followers alike, so that a failover is not blind;
reconcilers and collectors read it. It is memory only: after a start everything is at first sight
again, which is what the calm after a start is for (`rules.calm`). Neighbour: `rules.liveness`.
"""

from __future__ import annotations

from llmkube.clock import Now
from llmkube.rules.liveness import Record, Sighting, Trust, observe


class LivenessBook:
    """Records by key. All methods are cheap and belong to the event loop's thread."""

    __slots__ = ("_records", "trust")

    def __init__(self, trust: Trust) -> None:
        self.trust = trust
        self._records: dict[str, Record] = {}

    def observe(self, key: str, sighting: Sighting, now: Now) -> Record | None:
        """Fold a sighting in; return the record, None while no stamp was ever seen."""
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

    def __len__(self) -> int:
        return len(self._records)

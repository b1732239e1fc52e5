"""How well an informer sees: what liveness and health checks are allowed to conclude.

`rules.calm.Sight` needs to know when a watch was down, for how long, and when it came back; a
liveness probe needs to know that every reflector still tries. Both are kept here. A blindness is
dated from the last sign of life: a stream that was found silent was blind since its last byte, and
a stream that opened and ended at once without a word was no sight at all.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from llmkube.clock import ZERO, Clock
from llmkube.rules.calm import FOREVER, Sight

CATCH_UP = timedelta(seconds=5)
"""A watch that resumes shows everything that it missed at once; that is over after so long."""


class WatchView:
    """One reflector's share of a View; the reflector reports, everybody may read.

    All instants are monotonic.
    """

    __slots__ = (
        "_blind_before",
        "_view",
        "alive",
        "attempted_at",
        "down_since",
        "heard_at",
        "name",
        "opened_at",
    )

    def __init__(self, view: View, name: str, now: timedelta) -> None:
        self._view = view
        self.name = name
        self.alive = True
        self.attempted_at = now
        self.heard_at: timedelta | None = None
        self.opened_at: timedelta | None = None
        self.down_since: timedelta | None = now
        self._blind_before: timedelta | None = now

    def ended(self) -> None:
        """The reflector's task is over: nobody tries any more."""
        self.alive = False

    def attempted(self, now: timedelta) -> None:
        """A request is about to be sent."""
        self.attempted_at = now

    def opened(self, now: timedelta) -> None:
        """The stream is open."""
        self._blind_before = self.down_since
        self.opened_at = self.heard_at = now
        self.down_since = None
        self._view.refresh(now)

    def heard(self, now: timedelta) -> None:
        """An event, a bookmark, or a part of one has come."""
        self.heard_at = now

    def closed(self, now: timedelta, *, silent: bool = False, short: bool = False) -> None:
        """The stream is over: found `silent`, or so `short` that it showed nothing."""
        if self.opened_at is None:
            return
        self.opened_at = None
        self.down_since = now
        if silent:
            self.down_since = self.heard_at
        elif short:
            self.down_since = self._blind_before
        self._view.refresh(now)


class View:
    """The sight of a whole informer: up while each of its watches is."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._watches: list[WatchView] = []
        self._listeners: list[Callable[[], None]] = []
        self.sight = Sight(down_since=clock.now().mono)
        """For the calm rule; replaced whenever the watch goes down or comes back."""

    def add_watch(self, name: str) -> WatchView:
        """One more reflector that this view depends on."""
        watch = WatchView(self, name, self._clock.now().mono)
        self._watches.append(watch)
        return watch

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` each time `sight` changes: what was held back can be decided again."""
        self._listeners.append(listener)

    def refresh(self, now: timedelta) -> None:
        """Take what the reflectors have reported into `sight`."""
        down = [w.down_since for w in self._watches if w.down_since is not None]
        before = self.sight
        self.sight = before.lost(min(down)) if down else before.regained(now)
        if self.sight is not before:
            for listener in self._listeners:
                listener()

    # For the calm rule --------------------------------------------------------------------------

    @property
    def up(self) -> bool:
        """Streams are open, and none has been silent beyond the inactivity timeout."""
        return self.sight.down_since is None

    @property
    def down_since(self) -> timedelta | None:
        """Since when nothing was seen, None while the watch is up."""
        return self.sight.down_since

    @property
    def up_since(self) -> timedelta | None:
        """When the watch came back last, None before it was ever up."""
        return self.sight.outages[-1].ended if self.sight.outages else None

    @property
    def last_outage(self) -> timedelta:
        """How long it had been down when it came back last; FOREVER at the start."""
        return self.sight.outages[-1].length if self.sight.outages else FOREVER

    def catching_up(self, now: timedelta) -> bool:
        """Whether what the watch shows may be what we missed while it was down (after a start
        it is not: that shows a list)."""
        if self.up_since is None or self.last_outage == FOREVER:
            return False
        return now - self.up_since < CATCH_UP

    # For health and metrics ---------------------------------------------------------------------

    @property
    def task_alive(self) -> bool:
        """Every reflector's task runs."""
        return all(watch.alive for watch in self._watches)

    @property
    def last_event_at(self) -> timedelta | None:
        """The last event or bookmark of the stream that has been quiet longest."""
        heard = [watch.heard_at for watch in self._watches]
        return None if not heard or None in heard else min(h for h in heard if h is not None)

    @property
    def last_attempt_at(self) -> timedelta | None:
        """The last attempt of the reflector without a stream that has not tried for longest."""
        idle = [watch.attempted_at for watch in self._watches if watch.opened_at is None]
        return min(idle, default=None)

    def complaint(self, limit: timedelta) -> str | None:
        """For a liveness probe: what is wrong with a reflector that cannot mend itself.

        An ended task is, and so is one that has no stream and has tried nothing for `limit`. An
        API server that refuses or is away is not: a restart would not help.
        """
        now = self._clock.now().mono
        for watch in self._watches:
            if not watch.alive:
                return f"the reflector of {watch.name} has ended"
            if watch.opened_at is None and now - watch.attempted_at > limit:
                return f"the reflector of {watch.name} has no stream and does not try to get one"
        return None


def age(view: View, clock: Clock) -> timedelta | None:
    """How long ago the last event or bookmark came, None before the first."""
    heard = view.last_event_at
    return None if heard is None else max(clock.now().mono - heard, ZERO)

"""How well an informer sees: what liveness and health checks are allowed to conclude.

`rules.calm.Sight` needs to know when a watch was down, for how long, and when it came back; a
liveness probe needs to know that every reflector still tries. Both are kept here, for each watch by
itself: a namespace that we may not read any more says nothing about the others. A blindness is
dated from the last sign of life: a stream that was found silent was blind since its last byte, and
a stream that opened and ended at once without a word was no sight at all. A stream can be open and
blind, too: then a request that goes unanswered tells (`WatchView.stalled`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

from llmkube.clock import ZERO, Clock
from llmkube.informers.options import DEFAULTS, ReflectorSettings
from llmkube.rules.calm import FOREVER, Sight


class WatchView:
    """One reflector's share of a View; the reflector reports, everybody may read.

    All instants are monotonic.
    """

    __slots__ = (
        "_before_opening",
        "_changed",
        "_resumed_at",
        "_settings",
        "alive",
        "attempted_at",
        "heard_at",
        "name",
        "opened_at",
        "sight",
    )

    def __init__(
        self, name: str, now: timedelta, changed: Callable[[], None], settings: ReflectorSettings
    ) -> None:
        self.name = name
        self._settings = settings
        self.alive = True
        self.attempted_at = now
        self.heard_at: timedelta | None = None
        self.opened_at: timedelta | None = None
        self.sight = Sight(down_since=now)
        """For the calm rule; replaced whenever the watch goes down or comes back."""
        self._before_opening = self.sight
        self._resumed_at: timedelta | None = None
        self._changed = changed

    # What the reflector reports -----------------------------------------------------------------

    def ended(self) -> None:
        """The reflector's task is over: nobody tries any more."""
        self.alive = False

    def attempted(self, now: timedelta) -> None:
        """A request is about to be sent."""
        self.attempted_at = now

    def opened(self, now: timedelta) -> None:
        """The stream is open."""
        self._before_opening = self.sight
        self.opened_at = self.heard_at = now
        if self.sight.outages:  # a start shows a list
            self._resumed_at = now
        self._see(self.sight.regained(now))

    def heard(self, now: timedelta) -> None:
        """An event, a bookmark, or a part of one has come."""
        if self.heard_at is not None and now - self.heard_at > self._settings.long_silence:
            self._resumed_at = now
        self.heard_at = now

    def closed(self, now: timedelta, *, silent: bool = False, short: bool = False) -> None:
        """The stream is over: found `silent`, or so `short` that it showed nothing."""
        if self.opened_at is None:
            return
        self.opened_at = None
        if silent and self.heard_at is not None:
            self._see(self.sight.lost(self.heard_at))
        elif short:
            self._see(self._before_opening)
        else:
            self._see(self.sight.lost(now))

    def stalled(self, since: timedelta, now: timedelta) -> None:
        """The API server answered nothing from `since` to `now`: whoever sent something in that
        time sent it in vain, however open our stream is."""
        if self.sight.down_since is None:
            self._see(self.sight.lost(since).regained(now))

    def _see(self, sight: Sight) -> None:
        before, self.sight = self.sight, sight
        if sight is not before:
            self._changed()

    # What may be concluded ----------------------------------------------------------------------

    def catching_up(self, now: timedelta) -> bool:
        """Whether what the watch shows may be what we missed while it was down or silent (after
        a start it is not: that shows a list)."""
        return self._resumed_at is not None and now - self._resumed_at < self._settings.catch_up


class View:
    """The sight of a whole informer, by namespace if its watches are."""

    def __init__(self, clock: Clock, settings: ReflectorSettings = DEFAULTS) -> None:
        self._clock = clock
        self._settings = settings
        self._watches: list[WatchView] = []
        self._by_scope: dict[str, WatchView] = {}
        self._listeners: list[Callable[[], None]] = []

    def add_watch(self, name: str, scope: str | None = None) -> WatchView:
        """One more reflector that this view depends on: of that namespace, None for all."""
        watch = WatchView(name, self._clock.monotonic(), self._sight_changed, self._settings)
        self._watches.append(watch)
        if scope is not None:
            self._by_scope[scope] = watch
        return watch

    @property
    def watches(self) -> Sequence[WatchView]:
        """What this view is made of."""
        return self._watches

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` each time a sight changes: what was held back can be decided again."""
        self._listeners.append(listener)

    def _sight_changed(self) -> None:
        for listener in self._listeners:
            listener()

    def stalled(self, asked: timedelta, now: timedelta) -> None:
        """What was asked then is answered only now, or not at all: see WatchView.stalled."""
        for watch in self._watches:
            watch.stalled(asked if watch.heard_at is None else min(watch.heard_at, asked), now)

    # For the calm rule --------------------------------------------------------------------------

    def watch_of(self, key: str) -> WatchView:
        """The watch that shows the object "namespace/name" (or "name")."""
        if not self._by_scope:
            return self._watches[0]
        return self._by_scope[key.partition("/")[0]]

    def sight_of(self, key: str) -> Sight:
        """How well we see that object."""
        return self.watch_of(key).sight

    def catching_up(self, key: str, now: timedelta) -> bool:
        """Whether what is shown of that object now may have waited for us: see WatchView."""
        return self.watch_of(key).catching_up(now)

    @property
    def sight(self) -> Sight:
        """The sight of the watch that sees least: the one that is down for longest, else the one
        that came back last."""
        return min((watch.sight for watch in self._watches), key=_clarity)

    @property
    def up(self) -> bool:
        """Streams are open, and none has been silent beyond the inactivity timeout."""
        return self.sight.down_since is None

    @property
    def down_since(self) -> timedelta | None:
        """Since when nothing was seen, None while all watches are up."""
        return self.sight.down_since

    @property
    def up_since(self) -> timedelta | None:
        """When the watch came back last, None before it was ever up."""
        return self.sight.outages[-1].ended if self.sight.outages else None

    @property
    def last_outage(self) -> timedelta:
        """How long it had been down when it came back last; FOREVER at the start."""
        return self.sight.outages[-1].length if self.sight.outages else FOREVER

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
        now = self._clock.monotonic()
        for watch in self._watches:
            if not watch.alive:
                return f"the reflector of {watch.name} has ended"
            if watch.opened_at is None and now - watch.attempted_at > limit:
                return f"the reflector of {watch.name} has no stream and does not try to get one"
        return None


def _clarity(sight: Sight) -> tuple[bool, timedelta]:
    """The least of these sees least."""
    if sight.down_since is not None:
        return False, sight.down_since
    return True, -sight.outages[-1].ended


def age(view: View, clock: Clock) -> timedelta | None:
    """How long ago the last event or bookmark came, None before the first."""
    heard = view.last_event_at
    return None if heard is None else max(clock.monotonic() - heard, ZERO)

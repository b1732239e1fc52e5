"""The store: what an informer knows of the cluster, by key and by index.

Readers see the newest complete version of each object that the watch has delivered; objects are
immutable, so they are handed out as they are. Only the informer that owns a store writes to it.
Read `reflector` for how it is kept equal to the server, `guard` for what to do about the moment
by which it lags behind our own writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

import msgspec

from llmkube.clock import Now


class HasMeta(Protocol):
    """The metadata that informers read."""

    @property
    def uid(self) -> str: ...

    @property
    def resource_version(self) -> str: ...


class Cached(Protocol):
    """What a store can hold: an immutable object that knows its key."""

    @property
    def key(self) -> str: ...

    @property
    def metadata(self) -> HasMeta: ...


T = TypeVar("T", bound=Cached)

Index = Callable[[T], Iterable[str]]
"""The values under which an object is found; none is fine. Must be pure."""


class Change(msgspec.Struct, Generic[T], frozen=True, gc=False):
    """One step of one object in the store.

    `old` is None for an object that was not there, `new` is None for one that is gone.
    `first_sight` says that it came from a list (a start, or a re-list after blindness), so nothing
    is known of when it happened. `at` is when it was seen, on both clocks.
    """

    key: str
    old: T | None
    new: T | None
    first_sight: bool
    at: Now


class Store(Generic[T]):
    """Objects by key, with indexes kept up to date by `put` and `remove`."""

    __slots__ = ("_functions", "_indexes", "_objects")

    def __init__(self, indexes: Mapping[str, Index[T]] | None = None) -> None:
        self._objects: dict[str, T] = {}
        self._functions = dict(indexes or {})
        self._indexes: dict[str, dict[str, _Keys]] = {n: {} for n in self._functions}

    # Reading ------------------------------------------------------------------------------------

    def get(self, key: str) -> T | None:
        """The object of that key, or None."""
        return self._objects.get(key)

    def keys(self) -> list[str]:
        """All keys, as of now."""
        return list(self._objects)

    def values(self) -> list[T]:
        """All objects, as of now."""
        return list(self._objects.values())

    def by_index(self, name: str, value: str) -> list[T]:
        """The objects that the index `name` files under `value`, oldest entry first.

        Raises KeyError for an index that the store does not keep.
        """
        keys = self._indexes[name].get(value, ())
        return [self._objects[key] for key in ((keys,) if isinstance(keys, str) else keys)]

    def __len__(self) -> int:
        return len(self._objects)

    def __contains__(self, key: str) -> bool:
        return key in self._objects

    def __iter__(self) -> Iterator[T]:
        return iter(self.values())

    # Writing (the informer's) -------------------------------------------------------------------

    def put(self, obj: T) -> T | None:
        """Keep `obj` and return what it replaces.

        An index function that raises leaves the store as it was, and the error goes to the caller.
        """
        key = obj.key
        filed = self._values(obj) if self._functions else {}
        old = self._objects.get(key)
        self._objects[key] = obj
        if filed:
            self._file(key, {} if old is None else self._values(old), filed)
        return old

    def remove(self, key: str) -> T | None:
        """Drop the object of that key and return it, or None."""
        old = self._objects.pop(key, None)
        if old is not None and self._functions:
            self._file(key, self._values(old), {})
        return old

    def _values(self, obj: T) -> dict[str, set[str]]:
        return {name: set(function(obj)) for name, function in self._functions.items()}

    def _file(self, key: str, old: dict[str, set[str]], new: dict[str, set[str]]) -> None:
        for name, index in self._indexes.items():
            before, after = old.get(name, set()), new.get(name, set())
            for value in before - after:
                _remove(index, value, key)
            for value in after - before:
                _add(index, value, key)


# Nearly always one object is found under a value, and a dict of one costs 230 bytes more.
_Keys = str | dict[str, None]


def _add(index: dict[str, _Keys], value: str, key: str) -> None:
    keys = index.get(value)
    if keys is None:
        index[value] = key
    elif isinstance(keys, str):
        index[value] = {keys: None, key: None}
    else:
        keys[key] = None


def _remove(index: dict[str, _Keys], value: str, key: str) -> None:
    keys = index[value]
    if isinstance(keys, str):
        del index[value]
    else:
        del keys[key]
        if len(keys) == 1:
            (index[value],) = keys

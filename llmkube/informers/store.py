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


_Places = list[tuple[str, ...]]
"""The values under which one object is found, for each index in turn."""


class Store(Generic[T]):
    """Objects by key, with indexes kept up to date by `put` and `remove`."""

    __slots__ = ("_functions", "_indexes", "_nowhere", "_objects")

    def __init__(self, indexes: Mapping[str, Index[T]] | None = None) -> None:
        self._objects: dict[str, T] = {}
        self._functions = list((indexes or {}).values())
        self._indexes: dict[str, dict[str, _Keys]] = {name: {} for name in indexes or {}}
        self._nowhere: _Places = [() for _ in self._functions]

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
        places = self._places(obj)
        old = self._objects.get(key)
        self._objects[key] = obj
        before = self._nowhere if old is None else self._places(old)
        if places != before:
            self._file(key, before, places)
        return old

    def remove(self, key: str) -> T | None:
        """Drop the object of that key and return it, or None."""
        old = self._objects.pop(key, None)
        if old is not None:
            self._file(key, self._places(old), self._nowhere)
        return old

    def _places(self, obj: T) -> _Places:
        if not self._functions:
            return self._nowhere
        return [tuple(function(obj)) for function in self._functions]

    def _file(self, key: str, old: _Places, new: _Places) -> None:
        for index, before, after in zip(self._indexes.values(), old, new, strict=True):
            for value in {*before}.difference(after):
                _remove(index, value, key)
            for value in {*after}.difference(before):
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

"""A command that is killed between two of its writes: `client.write_gate = StopAfter(2)`."""

from __future__ import annotations


class Stopped(Exception):
    """The command was killed here."""


class StopAfter:
    """A write gate that lets so many writes through and then stops the command."""

    def __init__(self, writes: int) -> None:
        self._left = writes

    def __call__(self) -> None:
        if self._left == 0:
            raise Stopped
        self._left -= 1

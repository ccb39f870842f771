"""Named things that the command line, the docs and the conformance tests find."""

import difflib
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


def near(name: str, known: Iterable[str]) -> str:
    """Returns ", did you mean 'x'?" for the closest of `known`, or the whole list."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "known: " + ", ".join(known) + "."


class Registry(Generic[T]):
    """A dictionary that names what it holds when asked for something it does not.

    Example:
        >>> shapes = Registry("shape")
        >>> @shapes.register("square")
        ... def square(): return 4
        >>> shapes.names()
        ('square',)
    """

    def __init__(self, kind: str):
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Returns a decorator that files its argument under `name`."""

        def add(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"the {self.kind} {name!r} is registered already")
            self._entries[name] = entry
            return entry

        return add

    def names(self) -> tuple[str, ...]:
        """Returns the registered names, sorted."""
        return tuple(sorted(self._entries))

    def get(self, name: str) -> T:
        """Returns the entry, or raises a ValueError that lists near names."""
        if name not in self._entries:
            raise ValueError(
                f"unknown {self.kind} {name!r}; {near(name, self._entries)}"
            )
        return self._entries[name]

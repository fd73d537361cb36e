"""Processes that fail: work in a thread that is stopped at any of its storage operations.

Only one thread runs at a time, so every interleaving is repeatable.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from gyre_core.storage import Storage

PATIENCE = 60.0
"""Seconds after which a thread that neither ends nor stops is a failure."""


class InjectedError(Exception):
    """A storage operation failed, before or after it took effect; the process lives."""


class InjectedCrash(BaseException):
    """The process died; no handler runs."""


@dataclass(frozen=True)
class Fault:
    """What happens at the `point`-th point; an operation has two, one before it and one after."""

    point: int
    kind: Literal["error", "crash", "freeze"]


class Actor:
    """Runs `work(storage)` in a thread of its own until it ends or freezes."""

    def __init__(self, inner: Storage, fault: Fault | None) -> None:
        self.storage = GatedStorage(inner, self)
        self.error: BaseException | None = None
        self.frozen = False
        self._fault = fault
        self._points = 0
        self._stopped, self._thawed = threading.Event(), threading.Event()

    def run(self, work: Callable[[Storage], Any]) -> None:
        """Start the work and wait until it ends or freezes; `error` is what ended it."""

        def body() -> None:
            try:
                work(self.storage)
            except BaseException as error:  # noqa: BLE001 - whoever started the actor judges it.
                self.error = error
            self._stopped.set()

        threading.Thread(target=body, daemon=True).start()
        assert self._stopped.wait(PATIENCE), "an actor hangs"

    def thaw(self) -> None:
        """Let a frozen actor go on to its end."""
        self.frozen = False
        self._stopped.clear()
        self._thawed.set()
        assert self._stopped.wait(PATIENCE), "a thawed actor hangs"

    def point(self) -> None:
        """Called by the storage before and after each operation."""
        self._points += 1
        if self._fault is None or self._points != self._fault.point:
            return
        if self._fault.kind == "error":
            raise InjectedError
        if self._fault.kind == "crash":
            raise InjectedCrash
        self.frozen = True
        self._stopped.set()
        assert self._thawed.wait(PATIENCE), "nobody thawed the actor"


class GatedStorage(Storage):
    """A storage whose every operation may be the last."""

    def __init__(self, inner: Storage, actor: Actor) -> None:
        self.inner, self.actor, self.url = inner, actor, inner.url

    def _pass(self, operation: str, *arguments: Any) -> Any:
        self.actor.point()
        result = getattr(self.inner, operation)(*arguments)
        self.actor.point()
        return result

    def read(self, name):
        return self._pass("read", name)

    def create(self, name, data):
        return self._pass("create", name, data)

    def replace(self, name, data):
        return self._pass("replace", name, data)

    def create_file(self, name, write):
        return self._pass("create_file", name, write)

    @contextmanager
    def local_file(self, name):
        self.actor.point()
        with self.inner.local_file(name) as path:
            yield path

    def list(self, folder=""):
        return self._pass("list", folder)

    def folders(self, folder=""):
        return self._pass("folders", folder)

    def exists(self, name):
        return self._pass("exists", name)

    def size(self, name):
        return self._pass("size", name)

    def delete(self, name):
        return self._pass("delete", name)

    def delete_folder(self, folder):
        return self._pass("delete_folder", folder)

    def free_bytes(self):
        return self.inner.free_bytes()

    def child(self, folder):
        return GatedStorage(self.inner.child(folder), self.actor)

"""The process that reward functions run in: loads them once, then answers calls until its parent closes or dies.

Started by `gyre_core.rewards.process`. Messages go over a socket of their own, so that what a function prints
disturbs nothing. It imports neither torch nor numpy; the functions may.
"""

from __future__ import annotations

import asyncio
import fcntl
import inspect
import os
import socket
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gyre_core.rewards import frames
from gyre_core.rewards.loader import RewardFunction, load_function, read_signature
from gyre_core.rewards.values import RewardError, read_values
from gyre_core.rewards.verl import adapt_compute_score


def main(connection_descriptor: int, lifeline_descriptor: int) -> None:
    """Serve the parent at the other end of the connection; returns when it closes it."""
    _die_with_parent(lifeline_descriptor)
    connection = socket.socket(fileno=connection_descriptor)  # Closes with the process, after its last words.
    with asyncio.Runner() as runner:
        try:
            functions = _load(connection)
            while functions:
                request = frames.receive(connection)
                frames.send(connection, _answer(functions[request["function"]], request, runner))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


def _die_with_parent(lifeline_descriptor: int) -> None:
    """Have the kernel end this process group when the write end of the lifeline pipe closes.

    SIGIO, whose default action ends a process, works even while a function holds the interpreter in native code.
    """
    fcntl.fcntl(lifeline_descriptor, fcntl.F_SETOWN, -os.getpgrp())
    flags = fcntl.fcntl(lifeline_descriptor, fcntl.F_GETFL)
    fcntl.fcntl(lifeline_descriptor, fcntl.F_SETFL, flags | os.O_ASYNC)


def _load(connection: socket.socket) -> dict[str, RewardFunction]:
    """Load the functions of the parent's first message and answer with their signatures.

    After a function that cannot be loaded, the answer says why, and there are none.
    """
    request = frames.receive(connection)
    functions: dict[str, RewardFunction] = {}
    signatures: dict[str, Mapping[str, Any]] = {}
    try:
        for name, path in request["functions"].items():
            function = load_function(path, Path(request["base_folder"]))
            functions[name] = adapt_compute_score(path, function) if name in request["verl"] else function
            signatures[name] = asdict(read_signature(path, functions[name]))
    except ValueError as error:
        frames.send(connection, {"invalid": str(error)})
        return {}
    frames.send(connection, {"signatures": signatures})
    return functions


def _answer(function: RewardFunction, request: Mapping[str, Any], runner: asyncio.Runner) -> dict[str, Any]:
    """`outcomes` as `read_values` gives them, `broken` for a broken contract, or `error`, a traceback."""
    try:
        returned = function(**request["arguments"])
        if inspect.isawaitable(returned):
            returned = runner.run(_await(returned))
        return {"outcomes": read_values(request["function"], returned, request["rows"])}
    except RewardError as error:
        return {"broken": str(error)}
    except (Exception, SystemExit):  # noqa: BLE001 - whatever a function raises goes to the parent.
        return {"error": traceback.format_exc().rstrip()}


async def _await(awaitable: Any) -> Any:
    return await awaitable

"""The queue of generation requests: one object `requests/{request_id}.{attempt}` per attempt, counted from 1.

A request is open until its segment is there. A lost or failed attempt is answered by announcing the next one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from gyre_core.storage import Storage, unwatched
from gyre_core.types import GroupRequest, PolicyVersion, Prompt, RolloutRequest, SamplingParameters

REQUEST_FORMAT = "request/1"
POOL = "pool"
"""Folder of the segments, which are named after the requests that they answer."""


def request_name(step: int, shard: int) -> str:
    """The id of a step's `shard`-th request; ids sort by step, then shard."""
    return f"{step:08d}-{shard:04d}"


def request_step(request_id: str) -> int:
    """The step that a request id belongs to; raises ValueError for what is not one."""
    step, separator, shard = request_id.partition("-")
    if not (separator and step.isdecimal() and shard.isdecimal()):
        raise ValueError(f"{request_id!r} is not a request id; one looks like {request_name(12, 0)!r}")
    return int(step)


def announce(storage: Storage, request: RolloutRequest, attempt: int) -> None:
    """Publish an attempt of the request; announcing the same again is no error.

    Raises FileExistsError when another request was announced as this attempt (by an earlier epoch, with its policy
    version), and ValueError when a prompt's columns hold something that JSON cannot.
    """
    storage.create(_name(request.request_id, attempt), encode_request(request))


def announce_next(
    storage: Storage, request: RolloutRequest, attempt: int, require_owned: Callable[[], None] = unwatched
) -> int:
    """Publish the request as this attempt, or as the first one after it that nobody has announced otherwise.

    An owner that was frozen announces its own while it does not know yet that it is none any more. `require_owned` is
    asked where another one's stands, and raises for that owner, whose newer attempts would hide those of its successor;
    so `attempt` must come from what was listed before the last such look. Returns the attempt.
    """
    while True:
        try:
            announce(storage, request, attempt)
        except FileExistsError:
            require_owned()
            attempt += 1
        else:
            return attempt


def read_request(storage: Storage, request_id: str, attempt: int) -> RolloutRequest:
    """The announced attempt; raises FileNotFoundError, and ValueError for an object that is not this request."""
    name = _name(request_id, attempt)
    request = decode_request(storage.read(name), name)
    if request.request_id != request_id:
        raise ValueError(f"{name} holds request {request.request_id!r} instead of {request_id!r}; delete it")
    return request


def latest_attempt(storage: Storage, request_id: str) -> int:
    """The number of the newest announced attempt, counted from 1; 0 before the first."""
    return announced(storage).get(request_id, 0)


def announced(storage: Storage) -> dict[str, int]:
    """The newest attempt of each announced request, in the order of ids."""
    newest: dict[str, int] = {}
    for name in storage.list("requests"):
        request_id, _, attempt = name.removeprefix("requests/").rpartition(".")
        newest[request_id] = max(int(attempt), newest.get(request_id, 0))
    return dict(sorted(newest.items()))


def prune_requests(storage: Storage, before_step: int) -> None:
    """Remove the requests, claims and failures of steps that the admission ledger has closed, so that listings stay
    short."""
    for folder in ("requests", "claims", "failures"):
        for name in storage.list(folder):
            if request_step(name.removeprefix(f"{folder}/").rpartition(".")[0]) < before_step:
                storage.delete(name)


def encode_request(request: RolloutRequest) -> bytes:
    """The request as JSON; equal requests give equal bytes."""
    fields = {
        "format": REQUEST_FORMAT,
        "request_id": request.request_id,
        "step": request.step,
        "version": asdict(request.version),
        "sampling": asdict(request.sampling),
        "groups": [{"group_id": group.group_id, "prompt": _encode_prompt(group.prompt)} for group in request.groups],
    }
    try:
        return json.dumps(fields, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"request {request.request_id}: a prompt has a column that JSON cannot hold: {error}"
        ) from error


def decode_request(data: bytes, name: str) -> RolloutRequest:
    """The inverse of `encode_request`; `name` is the object's, for messages. Raises ValueError for another format."""
    try:
        fields: Mapping[str, Any] = json.loads(data)
        found = fields.get("format")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{name} is not a request: {error}") from error
    if found != REQUEST_FORMAT:
        raise ValueError(f"{name} has format {found!r}, and this version reads {REQUEST_FORMAT!r}")
    sampling: dict[str, Any] = fields["sampling"]
    groups = tuple(GroupRequest(group["group_id"], _decode_prompt(group["prompt"])) for group in fields["groups"])
    return RolloutRequest(
        request_id=fields["request_id"],
        step=fields["step"],
        version=PolicyVersion(**fields["version"]),
        groups=groups,
        sampling=replace(SamplingParameters(**sampling), stop=tuple(sampling["stop"])),
    )


def _encode_prompt(prompt: Prompt) -> dict[str, Any]:
    return {
        "prompt_id": prompt.prompt_id,
        "prompt": prompt.prompt,
        "text": prompt.text,
        "token_ids": prompt.token_ids.tolist(),
        "columns": dict(prompt.columns),
    }


def _decode_prompt(fields: Mapping[str, Any]) -> Prompt:
    return Prompt(
        prompt_id=fields["prompt_id"],
        prompt=fields["prompt"],
        text=fields["text"],
        token_ids=np.array(fields["token_ids"], dtype=np.int32),
        columns=fields["columns"],
    )


def _name(request_id: str, attempt: int) -> str:
    return f"requests/{request_id}.{attempt}"

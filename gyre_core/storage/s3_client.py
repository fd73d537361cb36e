"""Requests to an S3 service: each ends in time, is made again while that may help, and is counted when it was."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar, cast

from fsspec.asyn import sync
from s3fs import S3FileSystem

from gyre_core.storage.base import StorageError
from gyre_core.storage.s3_errors import REQUEST_ERRORS, describe, named_error, reason_to_repeat
from gyre_core.storage.s3_options import S3Options

T = TypeVar("T")

CONNECT_SECONDS = 5.0
READ_SECONDS = 30.0
REQUEST_SECONDS = 300.0
"""Deadline of one request with its body, whatever the other side does."""
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
"""Bounds of the pauses between tries, in seconds; a pause is drawn from zero to a bound that doubles."""
TOLD_AFTER = 4
"""Tries after which a request that does not succeed is logged."""

logger = logging.getLogger(__name__)
_jitter = random.Random()  # Of its own, as users and tests seed the global one.


class _OneTry(S3FileSystem):
    """s3fs without tries of its own, so that they are made and counted in one place."""

    retries = 1

    async def send(self, operation: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Make a request; returns the answer."""
        async with asyncio.timeout(REQUEST_SECONDS):
            return await self._call_s3(operation, **arguments)

    async def fetch(self, arguments: Mapping[str, Any]) -> bytes:
        """The body of `get_object`."""
        async with asyncio.timeout(REQUEST_SECONDS):
            response = await self._call_s3("get_object", **arguments)
            async with response["Body"] as body:
                return await body.read()


class S3Client:
    """One S3 service as one user. For any number of threads, though not in a forked child, where s3fs raises.

    `patience` is the seconds for which a request is made again.
    """

    def __init__(self, options: S3Options, patience: float) -> None:
        environment = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        self.endpoint = S3Options(endpoint=options.endpoint or environment).endpoint or "Amazon S3"
        self.patience = patience
        self._repeated: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._files = _OneTry(
            endpoint_url=options.endpoint or environment,
            key=options.access_key,
            secret=options.secret_key,
            token=options.session_token,
            client_kwargs={"region_name": options.region or os.environ.get("AWS_REGION")},
            config_kwargs={
                "connect_timeout": CONNECT_SECONDS,
                "read_timeout": min(READ_SECONDS, patience),
                "retries": {"total_max_attempts": 1},
            },
            use_listings_cache=False,
            skip_instance_cache=True,
        )

    def repeated(self) -> dict[str, int]:
        """Requests that were made again so far: `throttled`, in `conflict`, `failed` by the service, `unreachable`."""
        with self._counting:
            return dict(self._repeated)

    def call(
        self,
        operation: str,
        arguments: Mapping[str, Any],
        *,
        patience: float | None = None,
        repeat_conflicts: bool = True,
    ) -> dict[str, Any]:
        """Make a request by botocore's name of the `operation`; returns the answer.

        Raises FileNotFoundError (404), FileExistsError (412), ConflictError (409, unless it is repeated) and
        StorageError, in one sentence, for all else and when `patience` (default: the client's) is at its end.
        """
        return self._persist(operation, arguments, patience, repeat_conflicts, self._files.send, operation, arguments)

    def fetch(self, arguments: Mapping[str, Any]) -> bytes:
        """The body of `get_object`; raises like `call`."""
        return self._persist("get_object", arguments, None, True, self._files.fetch, arguments)

    def _persist(
        self,
        operation: str,
        arguments: Mapping[str, Any],
        patience: float | None,
        repeat_conflicts: bool,
        request: Callable[..., Awaitable[T]],
        *given: Any,
    ) -> T:
        patience = self.patience if patience is None else patience
        started = time.monotonic()
        for tries in itertools.count(1):
            try:
                return cast(T, sync(self._files.loop, request, *given))
            except REQUEST_ERRORS as error:
                url = f"s3://{arguments['Bucket']}/{arguments.get('Key', arguments.get('Prefix', ''))}"
                reason = reason_to_repeat(error)
                if reason is None or (reason == "conflict" and not repeat_conflicts):
                    raise named_error(error, operation, url, self.endpoint) from error
                with self._counting:
                    self._repeated[reason] += 1
                pause = _jitter.uniform(0.0, min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(tries, 9)))
                if time.monotonic() + pause > started + patience:
                    raise StorageError(
                        f"{url}: {self.endpoint} did not {_wanted(reason)} within {patience:g} s and {tries} tries; "
                        f"its last answer: {describe(error)}"
                    ) from error
                if tries == TOLD_AFTER:
                    logger.warning("%s: try %d failed (%s); going on for %g s", url, tries, describe(error), patience)
            time.sleep(pause)
        raise AssertionError("unreachable")


def _wanted(reason: str) -> str:
    return "answer" if reason == "unreachable" else "take the request"

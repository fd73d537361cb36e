"""Publishes policy versions beside whatever the learner does next.

A step ends with a copy of its weights. Their digests, the difference to the version before, and the writing of it are
made in a thread of their own, while the step is logged and saved and the next one trains. Who needs the version (the
generation that begins with it, an evaluation, the export) waits for it first, and so does the next publication, so that
one copy at the most is on its way. A publication that failed is tried again by whoever waits for it.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gyre_core.cluster.waiting import Awaited, wait_for_work
from gyre_core.types import PolicyVersion
from gyre_core.weights.flat import FlatWeights

if TYPE_CHECKING:
    from gyre_core.training.run import TrainingRun

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Publication:
    version: PolicyVersion
    parent: PolicyVersion
    weights: FlatWeights


class Publisher:
    """The publications of one run."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publisher")
        self._pending: _Publication | None = None
        self._attempt: Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a version is on its way."""
        return self._pending is not None

    def begin(self, version: PolicyVersion, parent: PolicyVersion, weights: FlatWeights) -> None:
        """Publish a version; the one before it must be `settled`."""
        assert self._pending is None, "one publication at a time"
        self._pending = _Publication(version, parent, weights)
        self._attempt = self._try(self._pending)

    async def settled(self) -> None:
        """Return once the version that was begun is published.

        Raises what its publication raised, and begins another attempt when the last one has failed already; and
        WaitExpiredError after `rollout.timeout`.
        """
        publication = self._pending
        if publication is None:
            return
        if self._attempt is None or self._attempt.done():
            self._attempt = self._try(publication)
        await wait_for_work(
            f"policy version {publication.version} to be published (rollout.timeout)",
            _end_of(self._attempt),
            whom=lambda: [Awaited(self._run.storage.url)],
            deadline=self._run.config.rollout.timeout,
        )

    def close(self) -> None:
        """Wait for the attempt that is under way."""
        self._thread.shutdown(wait=True)

    def _try(self, publication: _Publication) -> Future[None]:
        # With the caller's context, by which Prefect knows whose log lines they are.
        return self._thread.submit(contextvars.copy_context().run, self._publish, publication)

    def _publish(self, publication: _Publication) -> None:
        run = self._run
        try:
            run.require_owned()
            run.chain.publish(publication.version, publication.parent, publication.weights)
            # Publishing takes long, and who was superseded meanwhile does not know what the next owner needs.
            run.require_owned()
            run.chain.retain(run.guard.versions_kept)
        except Exception as error:
            logger.warning("policy version %s is not published yet: %s", publication.version, error)
            raise
        self._pending = None


async def _end_of(attempt: Future[None]) -> None:
    """Whoever waits may be cancelled; the attempt goes on."""
    await asyncio.shield(asyncio.wrap_future(attempt))

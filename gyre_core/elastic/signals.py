"""What the scaling law sees of a run in one interval."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Signals:
    """The readings of one interval, the time since the last decision; None stands for a reading that is missing.

    Rates are completion tokens per second, shares lie between 0 and 1.
    """

    fill: float | None
    """Fresh samples ready, as a share of those that generation may be ahead, averaged over the interval; None at
    `rollout.max_lag` 0, where it has no meaning."""
    pool_tokens: float | None
    """Tokens that the pool holds at a fill of 1: samples times their mean length. None at `rollout.max_lag` 0."""
    produced: float | None
    """What all workers together generated, over the same time as `consumed`."""
    consumed: float | None
    """What the learner took; over its last whole step where a step takes longer than the interval, as a learner takes
    a step's samples at once."""
    worker_rate: float | None
    """Median over the workers of what one generates while it is busy; of workers that were never busy in the interval
    the last that is known."""
    queued: int | None
    """Requests that were announced and that no worker had taken: the most at one time in the interval, as at its end a
    step may just have been handed out."""
    learner_wait: float | None
    """Share of the interval in which the learner was free and had too few samples."""
    worker_idle: float | None
    """Share of the workers' time in which they had nothing to generate, or were held back."""
    stale_share: float | None
    """Share of the pool's fresh samples that are past half of `experience.time_window`."""
    loss_spread_growth: float | None
    """Spread of the recent losses over that of the losses before them; above 1 it grows. 1 while there are too few
    losses to tell."""
    start_seconds: float | None
    """Median time from asking for a worker to its first token."""
    live: int
    """Workers that generate; one that died counts until that is noticed."""
    starting: int
    """Workers that are asked for and not live yet, the replacements of dead ones included."""
    draining: int
    """Workers that finish what they have and go."""

"""What the scaling law sees of a running run, and the number of workers that follows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import numpy as np

from gyre_core.cluster.fleet import Target
from gyre_core.elastic.scaler import Decision, Scaler
from gyre_core.elastic.signals import Signals
from gyre_core.training.remote import RemoteRollout, WorkTotals
from gyre_core.training.run import TrainingRun

SPREAD_WINDOW = 20
"""Losses whose spread is compared with that of as many before them."""


class Scaling:
    """Reads the signals of an interval and moves the number of workers that the run wants."""

    def __init__(self, run: TrainingRun, remote: RemoteRollout) -> None:
        """Goes on from `run.scaling_state`, which a checkpoint may have brought."""
        self._run = run
        self._remote = remote
        self._scaler = Scaler(run.config)
        if run.scaling_state:
            self._scaler.load_state(run.scaling_state["scaler"])
            remote.target = Target(**run.scaling_state["target"])
        self._last = time.monotonic()
        self._totals = WorkTotals()
        self._rates: dict[str, tuple[int, float]] = {}
        self._rate: float | None = None
        self._tokens = run.tokens_consumed
        self._waited = run.learner_waited()
        self._keep()

    def decide(self) -> Decision:
        """Decide once, from what happened since the last time.

        Called in the thread that owns the pool, while the event loop may begin and commit steps.
        """
        now = time.monotonic()
        signals = self._read(now - self._last)
        decision = self._scaler.decide(signals, now - self._last)
        self._last = now
        target = self._remote.target
        if decision.wanted != target.workers:
            reason = " ".join(decision.reasons)
            self._remote.target = replace(target, workers=decision.wanted, decision=target.decision + 1, reason=reason)
        self._keep()
        return decision

    def _keep(self) -> None:
        self._run.scaling_state = {
            "scaler": self._scaler.state(),
            "target": asdict(self._remote.target),
        }

    def _read(self, seconds: float) -> Signals:
        run, remote = self._run, self._remote
        done = remote.totals.since(self._totals)
        self._totals = replace(remote.totals)
        tokens, waited = run.tokens_consumed, run.learner_waited()
        consumed, self._tokens = tokens - self._tokens, tokens
        wait, self._waited = waited - self._waited, waited
        queued, remote.most_queued = remote.most_queued, 0
        live = remote.registry.count(("ready",))
        starts = [
            sum(worker.beat.start.values()) for worker in remote.registry.workers if "first_token" in worker.beat.start
        ]
        last = run.results[run.step].metrics if run.step in run.results else {}
        return Signals(
            fill=self._fill(),
            pool_tokens=self._pool_tokens(last),
            produced=done.tokens / seconds,
            consumed=consumed / seconds,
            worker_rate=self._worker_rate(),
            queued=queued,
            learner_wait=min(1.0, max(0.0, wait / seconds)),
            worker_idle=done.idle_share,
            stale_share=last.get("experience/stale_share", 0.0),
            loss_spread_growth=spread_growth([result.metrics.get("loss") for result in list(run.results.values())]),
            start_seconds=statistics.median(starts) if starts else None,
            live=live,
            starting=max(0, self._remote.target.workers - live - self._remote.given_up),
            draining=remote.registry.count(("draining",)),
        )

    def _fill(self) -> float | None:
        """Mean of the interval's readings, or the fill as it is now when there was none; None on-policy."""
        run = self._run
        if run.config.rollout.max_lag == 0:
            return None
        readings, run.fill_readings = run.fill_readings, []
        return statistics.fmean(readings) if readings else run.fill(run.turns.current - 1)

    def _pool_tokens(self, last: Mapping[str, float]) -> float | None:
        rollout = self._run.config.rollout
        length = last.get("completions/mean_length")
        ahead = rollout.max_lag * rollout.batch_size * rollout.samples_per_prompt
        return ahead * length if ahead and length else None

    def _worker_rate(self) -> float | None:
        """Median over the ready workers of their tokens per busy second in the interval; else the last one."""
        rates: list[float] = []
        for worker in self._remote.registry.workers:
            beat = worker.beat
            tokens, busy = self._rates.get(beat.token, (0, 0.0))
            if worker.phase == "ready" and beat.busy_seconds > busy:
                rates.append((beat.tokens - tokens) / (beat.busy_seconds - busy))
            self._rates[beat.token] = beat.tokens, beat.busy_seconds
        self._rate = statistics.median(rates) if rates else self._rate
        return self._rate


def spread_growth(losses: Sequence[float | None]) -> float:
    """Spread of the newest SPREAD_WINDOW losses over that of as many before them; 1 while there are too few."""
    known = np.array([loss for loss in losses if loss is not None], dtype=np.float64)
    if len(known) < 2 * SPREAD_WINDOW:
        return 1.0
    before, recent = known[-2 * SPREAD_WINDOW : -SPREAD_WINDOW].std(), known[-SPREAD_WINDOW:].std()
    return float(recent / before) if before > 0.0 else 1.0


def decision_line(decision: Decision, step: int) -> str:
    """A decision for people, in a line."""
    return f"step {step}: {decision.direction} to {decision.wanted} workers. {' '.join(decision.reasons)}"

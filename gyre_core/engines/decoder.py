"""Continuous batching: sequences of any length decoded together, one token each a step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from gyre_core.engines.kv_cache import SlotCache
from gyre_core.engines.prefill import Prefill, prefill
from gyre_core.engines.rows import RowTable
from gyre_core.engines.stopping import StopTexts
from gyre_core.engines.streams import Job
from gyre_core.policy.models import Policy, copy_weights
from gyre_core.policy.sampling import group_key, sample_tokens, truncated_log_probabilities, uniform
from gyre_core.policy.tokens import decode_all
from gyre_core.types import Completion, PolicyVersion, SamplingParameters

Arrival = tuple[Job, Completion | None]
"""A finished sequence, or None for one that was given up."""
PREFILL_TOKENS = 8192
"""Prompt tokens, padding included, that one prefill computes at the most; a longer prompt is computed alone."""


class Decoder:
    """The batch of one engine: a queue of groups, their prefill, and the rows in flight.

    A row that finishes leaves at once: the last row takes its place and the queue refills the end, so that a long
    sequence holds nobody. What is computed is a function of the weights and of the order of calls alone.
    Not thread-safe: one thread owns it.
    """

    def __init__(self, policy: Policy, sequences_in_flight: int) -> None:
        self.version: PolicyVersion | None = None
        self.generated_tokens = 0
        self.finished_sequences = 0
        self.decode_steps = 0
        """Forward passes that made one token for each row in flight."""
        self._policy = policy
        self._capacity = sequences_in_flight
        self._eos_ids = np.array(policy.tokens.eos_ids, dtype=np.int64)
        self.reset()

    def reset(self) -> None:
        """Forget every sequence and free the cache."""
        self.in_flight = 0
        """Sequences that have a row."""
        self.queued = 0
        """Sequences that wait for one."""
        self._waiting: deque[Job] = deque()
        self._prefill: Prefill | None = None
        self._settings: list[SamplingParameters] = []
        self._rows = RowTable(self._capacity)
        self._cache = SlotCache(self._policy.model.config.num_hidden_layers)

    @property
    def busy(self) -> bool:
        """Whether anything is left to generate."""
        return bool(self.in_flight or self._prefill or self._waiting)

    def load(self, version: PolicyVersion, weights: Mapping[str, torch.Tensor]) -> None:
        """Hold these weights; raises ValueError as `copy_weights` does."""
        copy_weights(self._policy.model, weights)
        self.version = version

    def close(self) -> None:
        """Free the weights; nothing can be generated any more."""
        self.reset()
        self._policy.model.to_empty(device="meta")

    def add(self, jobs: Iterable[Job]) -> None:
        """Queue groups behind those that wait already."""
        for job in jobs:
            self._waiting.append(job)
            self.queued += job.sampling.samples
            self._rows.reserve(job.sampling.max_tokens)
            if job.sampling not in self._settings:
                self._settings.append(job.sampling)

    @torch.inference_mode()
    def drop(self, jobs: set[Job]) -> list[Arrival]:
        """Give up what is left of these groups; returns a None for each of their sequences."""
        dropped = [job for job in self._waiting if job in jobs for _ in range(job.sampling.samples)]
        self._waiting = deque(job for job in self._waiting if job not in jobs)
        if self._prefill:
            dropped += self._prefill.drop(jobs)
            self._settle_prefill()
        self.queued -= len(dropped)
        rows = np.array([row for row in range(self.in_flight) if self._rows.job(row) in jobs], dtype=np.int64)
        dropped += [self._rows.job(row) for row in rows.tolist()]
        self._remove(rows)
        self._reset_when_idle()
        return [(job, None) for job in dropped]

    @torch.inference_mode()
    def step(self) -> list[Arrival]:
        """Fill the free rows, then make one token for each row; returns the sequences that finished."""
        finished: list[Arrival] = []
        while self.in_flight < self._capacity and (self._prefill or self._waiting):
            finished += self._place()
        if self.in_flight:
            finished += self._decode()
        self._reset_when_idle()
        return finished

    def _reset_when_idle(self) -> None:
        """Begin each busy period alike: the same requests then give the same bits, and idle memory is free."""
        if not self.busy:
            self.reset()

    def _place(self) -> list[Arrival]:
        """Give free rows to samples of prefilled groups, and each its first token from the prompt's logits."""
        if self._prefill is None:
            self._prefill = prefill(self._policy.model, self._next_jobs(), self._policy.tokens.pad_id)
        source, rows = self._prefill, self._rows
        groups, samples = source.take(self._capacity - self.in_flight)
        first, end = self.in_flight, self.in_flight + len(groups)
        placed = slice(first, end)
        jobs = [source.jobs[group] for group in groups]
        keys = np.array([group_key(job.request.group_id) for job in source.jobs], dtype=np.uint64)
        settings = np.array([self._settings.index(job.sampling) for job in source.jobs])
        limits = np.array([job.sampling.max_tokens for job in source.jobs])
        rows.jobs[placed] = jobs
        rows.group_keys[placed], rows.sample_indices[placed] = keys[groups], samples
        rows.settings[placed], rows.limits[placed] = settings[groups], limits[groups]
        rows.prompt_lengths[placed], rows.lengths[placed] = source.prompt_lengths[groups], 0
        rows.started_at[placed] = time.time()
        sources = torch.from_numpy(groups).to(source.logits.device)
        self._cache.place(source.prefix, sources, first)
        self.in_flight = end
        self.queued -= len(groups)
        self._settle_prefill()
        return self._append(first, source.logits[sources])

    def _next_jobs(self) -> list[Job]:
        """As many waiting groups as the free rows and the prefill's size allow; one at least."""
        jobs = [self._waiting.popleft()]
        longest, samples = len(jobs[0].request.prompt.token_ids), jobs[0].sampling.samples
        while self._waiting and samples < self._capacity - self.in_flight:
            longest = max(longest, len(self._waiting[0].request.prompt.token_ids))
            if longest * (len(jobs) + 1) > PREFILL_TOKENS:
                break
            jobs.append(self._waiting.popleft())
            samples += jobs[-1].sampling.samples
        return jobs

    def _settle_prefill(self) -> None:
        if self._prefill and not len(self._prefill.groups):
            self._prefill = None

    def _decode(self) -> list[Arrival]:
        """Run the model on the newest token of each row."""
        count, device = self.in_flight, self._policy.model.device
        positions = self._rows.prompt_lengths[:count] + self._rows.lengths[:count] - 1
        at = torch.from_numpy(positions).to(device)
        output = self._policy.model(
            input_ids=torch.from_numpy(self._rows.newest_tokens(np.arange(count))).to(device, torch.int64)[:, None],
            attention_mask=self._cache.aim(at, int(positions.max()) + 1),
            position_ids=at[:, None],
            cache=self._cache,
            use_cache=True,
        )
        self.decode_steps += 1
        return self._append(0, output.logits[:, -1])

    def _append(self, first: int, logits: torch.Tensor) -> list[Arrival]:
        """Sample a token for each row from `first` on by `logits`, `[rows, vocabulary]`, and finish what ends."""
        rows = np.arange(first, self.in_flight)
        for setting, sampling in enumerate(self._settings):
            chosen = np.flatnonzero(self._rows.settings[rows] == setting)
            if not len(chosen):
                continue
            part = logits if len(chosen) == len(rows) else logits[torch.from_numpy(chosen).to(logits.device)]
            token_ids, log_probabilities = self._sample(rows[chosen], part, sampling)
            self._rows.append_tokens(rows[chosen], token_ids, log_probabilities)
        ended = rows[self._ended(rows)]
        arrivals = self._finished(ended)
        self._remove(ended)
        return arrivals

    def _sample(
        self, rows: NDArray[np.int64], logits: torch.Tensor, sampling: SamplingParameters
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """A token for each row and its log-probability; at temperature 0 the likeliest, and its plain one."""
        if sampling.temperature == 0.0:
            distribution = logits.float().log_softmax(dim=-1)
            token_ids = distribution.argmax(dim=-1)
        else:
            table = self._rows
            noise = uniform(sampling.seed, table.group_keys[rows], table.sample_indices[rows], table.lengths[rows])
            distribution = truncated_log_probabilities(logits, sampling.temperature, sampling.top_p, sampling.top_k)
            token_ids = sample_tokens(distribution, torch.from_numpy(noise).to(logits.device))
        log_probabilities = distribution.gather(1, token_ids[:, None]).squeeze(1).cpu().numpy()
        if not np.isfinite(log_probabilities).all():
            raise FloatingPointError(f"policy version {self.version} gives logits that are no numbers")
        return token_ids.cpu().numpy(), log_probabilities

    def _ended(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each row has ended: by an end-of-sequence token, by its length, or by a stop text."""
        table = self._rows
        ended = self._by_token(rows) | (table.lengths[rows] >= table.limits[rows])
        for setting, sampling in enumerate(self._settings):
            stop = StopTexts(sampling.stop)
            unfinished = np.flatnonzero(~ended & (table.settings[rows] == setting)) if stop.texts else ()
            for index in unfinished:
                ended[index] = stop.ends(self._policy.tokenizer, self._rows.completion(int(rows[index])))
        return ended

    def _by_token(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the newest token of each row is an end-of-sequence token."""
        return (self._rows.newest_tokens(rows)[:, None] == self._eos_ids).any(axis=1)

    def _finished(self, rows: NDArray[np.int64]) -> list[Arrival]:
        """The completions of rows that have ended."""
        by_token = self._by_token(rows).tolist()
        kept = [self._rows.completion(row).tolist() for row in rows.tolist()]
        texts = decode_all(
            self._policy.tokenizer, [ids[:-1] if cut else ids for ids, cut in zip(kept, by_token, strict=True)]
        )
        now = time.time()
        self.generated_tokens += int(self._rows.lengths[rows].sum())
        self.finished_sequences += len(rows)
        return [
            (self._rows.job(row), self._completion(row, text, ended_by_token, now))
            for row, text, ended_by_token in zip(rows.tolist(), texts, by_token, strict=True)
        ]

    def _completion(self, row: int, text: str, by_token: bool, now: float) -> Completion:
        assert self.version is not None
        table, job = self._rows, self._rows.job(row)
        token_ids = table.completion(row).copy()
        stop_at = StopTexts(job.sampling.stop).find(text)
        return Completion(
            group_id=job.request.group_id,
            sample_index=int(table.sample_indices[row]),
            token_ids=token_ids,
            log_probabilities=table.log_probabilities[row, : len(token_ids)].copy(),
            text=text[:stop_at],
            finish_reason="stop" if by_token or stop_at is not None else "length",
            version=self.version,
            started_at=float(table.started_at[row]),
            finished_at=now,
        )

    def _remove(self, rows: NDArray[np.int64]) -> None:
        """Take rows out; rows from the end move into the holes."""
        left = self.in_flight - len(rows)
        holes = rows[rows < left]
        if len(holes):
            tail = np.setdiff1d(np.arange(left, self.in_flight), rows)
            slots = int((self._rows.prompt_lengths[tail] + self._rows.lengths[tail]).max()) - 1
            self._rows.move(tail, holes)
            device = self._policy.model.device
            self._cache.move(torch.from_numpy(tail).to(device), torch.from_numpy(holes).to(device), slots)
        self.in_flight = left
        self._rows.jobs[left:] = None

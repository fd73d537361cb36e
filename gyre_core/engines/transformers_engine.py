"""The embedded engine: generates with any Hugging Face causal language model, on any device that torch knows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch
from transformers import PreTrainedConfig

from gyre_core.engines.base import EngineStats
from gyre_core.engines.decoder import Arrival, Decoder
from gyre_core.engines.streams import Job, Stream
from gyre_core.policy.models import Policy
from gyre_core.types import Completion, GroupRequest, PolicyVersion, SamplingParameters

P = ParamSpec("P")
T = TypeVar("T")


class TransformersEngine:
    """An `Engine` on transformers, with continuous batching and prompts shared within a group.

    It owns `policy.model`: give it a `copy_policy` of one that is trained. A completion ends with an
    end-of-sequence token of the policy, with the token that completes a stop text (tokens kept, text cut before it),
    or at `max_tokens`. Log-probabilities are those of the sampled distribution, in float32; at temperature 0 the
    likeliest token is taken, with its log-probability at temperature 1, untruncated. The distribution is the model's
    over its whole vocabulary, as the learner scores it: an id that the tokenizer lacks may be sampled, and has no text.

    One thread of its own does all computation and holds all state; every method hands it a job. So `generate` may
    be called from several event loops. While one call is open at a time, its result is bitwise a function of
    weights, requests and sampling parameters.
    """

    def __init__(self, policy: Policy, sequences_in_flight: int = 256) -> None:
        """Raises ValueError for a model with layers other than attention."""
        self.max_positions = int(min(policy.max_positions, attention_reach(policy.model.config)))
        policy.model.set_attn_implementation("sdpa")
        self._vocabulary: int = policy.model.config.vocab_size
        self._decoder = Decoder(policy, sequences_in_flight)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gyre-engine")
        self._open: dict[Stream, list[Job]] = {}
        self._stepping = False
        self._paused = False
        self._closed = False
        self._busy_seconds = 0.0

    @property
    def version(self) -> PolicyVersion | None:
        """The loaded policy version; None before the first load."""
        return self._decoder.version

    def generate(self, requests: Sequence[GroupRequest], sampling: SamplingParameters) -> AsyncGenerator[Completion]:
        """Complete each group's prompt `sampling.samples` times; yields sequences as they finish.

        Raises ValueError for sampling parameters out of range and for a prompt that is empty, holds unknown ids, or
        leaves no room for `max_tokens`; RuntimeError before the first `load_weights`, after `close`, and, while it
        is read, when the computation failed. Leaving the iterator early gives up the rest.
        """
        if self._closed or self.version is None:
            raise RuntimeError("the engine is closed" if self._closed else "the engine holds no policy version yet")
        check_sampling(sampling)
        for request in requests:
            self._check_prompt(request, sampling)
        return self._generate(requests, sampling)

    async def abort(self, group_ids: Sequence[str]) -> None:
        """Give up the unfinished sequences of these groups; their `generate` ends without them."""
        await self._in_thread(self._abort, frozenset(group_ids))

    async def pause(self) -> None:
        """Stop generating after the current token; sequences stay where they are."""
        await self._in_thread(self._set_paused, True)

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._in_thread(self._set_paused, False)

    async def load_weights(self, version: PolicyVersion, weights: Mapping[str, torch.Tensor]) -> None:
        """Hold this version from now on; `weights` is the model's state dict, in any float type.

        Raises RuntimeError while sequences are in flight, and ValueError as `copy_weights` does; the engine then
        holds what it held before.
        """
        await self._in_thread(self._load, version, weights)

    async def reset_cache(self) -> None:
        """Nothing to forget: prefixes live no longer than their group's sequences."""

    def stats(self) -> EngineStats:
        """Counters since the start, and the present load."""
        return EngineStats(
            generated_tokens=self._decoder.generated_tokens,
            finished_sequences=self._decoder.finished_sequences,
            busy_seconds=self._busy_seconds,
            in_flight=self._decoder.in_flight,
            queued=self._decoder.queued,
        )

    async def close(self) -> None:
        """End the engine and free its memory; unfinished `generate` calls raise RuntimeError."""
        if not self._closed:
            ending = self._thread.submit(self._close)
            self._closed = True
            await asyncio.wrap_future(ending)
            self._thread.shutdown(wait=False)

    async def _generate(
        self, requests: Sequence[GroupRequest], sampling: SamplingParameters
    ) -> AsyncGenerator[Completion]:
        stream = Stream(len(requests) * sampling.samples)
        try:
            await self._in_thread(self._submit, stream, [Job(request, sampling, stream) for request in requests])
            async for completion in stream.completions():
                yield completion
        finally:
            if not self._closed:
                await self._in_thread(self._end, stream)

    def _check_prompt(self, request: GroupRequest, sampling: SamplingParameters) -> None:
        token_ids = request.prompt.token_ids
        name = f"prompt {request.prompt.prompt_id!r} of group {request.group_id!r}"
        if not len(token_ids):
            raise ValueError(f"{name} has no tokens")
        if token_ids.min() < 0 or token_ids.max() >= self._vocabulary:
            raise ValueError(f"{name} holds a token id outside the policy's vocabulary of {self._vocabulary}")
        if len(token_ids) + sampling.max_tokens > self.max_positions:
            raise ValueError(
                f"{name} has {len(token_ids)} tokens, which with max_tokens {sampling.max_tokens} exceeds the "
                f"policy's {self.max_positions} positions; shorten the prompt or lower rollout.max_tokens"
            )

    async def _in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._closed:
            raise RuntimeError("the engine is closed")
        return await asyncio.wrap_future(self._thread.submit(function, *args, **kwargs))

    # What follows runs in the compute thread.

    def _submit(self, stream: Stream, jobs: list[Job]) -> None:
        self._open[stream] = jobs
        self._decoder.add(jobs)
        self._schedule()

    def _end(self, stream: Stream) -> None:
        self._decoder.drop(set(self._open.pop(stream, ())))

    def _abort(self, group_ids: frozenset[str]) -> None:
        jobs = {job for jobs in self._open.values() for job in jobs if job.request.group_id in group_ids}
        self._deliver(self._decoder.drop(jobs))

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused
        self._schedule()

    def _load(self, version: PolicyVersion, weights: Mapping[str, torch.Tensor]) -> None:
        if self._decoder.busy:
            raise RuntimeError(f"policy version {version} cannot be loaded while sequences are in flight")
        self._decoder.load(version, weights)

    def _close(self) -> None:
        self._fail(RuntimeError("it was closed"))
        self._decoder.close()

    def _schedule(self) -> None:
        """Have the next step run after the jobs that wait now."""
        if self._decoder.busy and not self._stepping and not self._paused:
            self._stepping = True
            self._thread.submit(self._step).add_done_callback(self._after_step)

    def _step(self) -> None:
        if self._decoder.busy and not self._paused:
            started = time.monotonic()
            arrivals = self._decoder.step()
            self._busy_seconds += time.monotonic() - started
            self._deliver(arrivals)

    def _after_step(self, step: Future[None]) -> None:
        self._stepping = False
        error = step.exception()
        if error is not None:
            self._fail(error)
        if not self._closed:
            self._schedule()

    def _fail(self, error: BaseException) -> None:
        self._decoder.reset()
        for stream in self._open:
            stream.put(error)
        self._open.clear()

    def _deliver(self, arrivals: Iterable[Arrival]) -> None:
        by_stream: dict[Stream, list[Completion | None]] = {}
        for job, completion in arrivals:
            by_stream.setdefault(job.stream, []).append(completion)
        for stream, completions in by_stream.items():
            stream.put(completions)


def check_sampling(sampling: SamplingParameters) -> None:
    """Raise ValueError, with the field's name, for a value that nothing can be sampled with."""
    limits = {
        "samples": sampling.samples >= 1,
        "max_tokens": sampling.max_tokens >= 1,
        "temperature": sampling.temperature >= 0.0,
        "top_p": 0.0 < sampling.top_p <= 1.0,
        "top_k": sampling.top_k >= 0,
        "stop": all(sampling.stop),
    }
    for name, within in limits.items():
        if not within:
            raise ValueError(f"sampling parameter {name} is {getattr(sampling, name)!r}, which is out of range")


def attention_reach(config: PreTrainedConfig) -> float:
    """How many positions back every layer sees; infinite without sliding windows.

    Raises ValueError for layers that keep a state other than keys and values.
    """
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(f"the transformers engine cannot run layers of type {', '.join(sorted(unknown))}; use vllm")
    window: int | None = getattr(config, "sliding_window", None)
    windowed = "sliding_attention" in kinds or not getattr(config, "layer_types", None)
    return window if window and windowed else float("inf")

"""Sample completions of a step for people to read: `completions/step-00000012.jsonl` in the run folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from gyre_core.storage import telling_out_of_space
from gyre_core.types import Rollout, RolloutGroup


def write_completions(
    folder: Path, step: int, groups: Sequence[RolloutGroup], advantages: Mapping[tuple[str, int], float], count: int
) -> None:
    """Write `count` sample completions of a step, the best and the worst among them; replaces an earlier file.

    `advantages` are by (group id, sample index); a completion without one was dropped, and shows null. `count` 0
    writes nothing. Raises OutOfSpaceError, and leaves nothing.
    """
    lines = [_to_line(group, rollout, advantages) for group, rollout in select_rollouts(groups, count)]
    if lines:
        target = folder / "completions" / f"step-{step:08d}.jsonl"
        data = "".join(lines).encode()
        # Whole or not at all for its readers, but not synced: nothing depends on it after a crash.
        unfinished = target.with_name(f".{target.name}")
        try:
            with telling_out_of_space(target, len(data)):
                target.parent.mkdir(exist_ok=True)
                unfinished.write_bytes(data)
                unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)


def select_rollouts(groups: Sequence[RolloutGroup], count: int) -> list[tuple[RolloutGroup, Rollout]]:
    """`count` rollouts at even distances in the ranking by reward, best first and worst last.

    Rollouts without a reward only fill places that are left.
    """
    pairs = [(group, rollout) for group in groups for rollout in group.rollouts]
    ranking = sorted((pair for pair in pairs if math.isfinite(pair[1].score.reward)), key=_rank)
    unscored = [pair for pair in pairs if not math.isfinite(pair[1].score.reward)]
    chosen = min(count, len(ranking))
    places = [round(place * (len(ranking) - 1) / max(1, chosen - 1)) for place in range(chosen)]
    return [ranking[place] for place in places] + unscored[: count - chosen]


def _rank(pair: tuple[RolloutGroup, Rollout]) -> tuple[float, str, int]:
    group, rollout = pair
    return (-rollout.score.reward, group.group_id, rollout.completion.sample_index)


def _to_line(group: RolloutGroup, rollout: Rollout, advantages: Mapping[tuple[str, int], float]) -> str:
    completion, score = rollout.completion, rollout.score
    record = {
        "step": group.step,
        "version": str(completion.version),
        "group_id": group.group_id,
        "sample_index": completion.sample_index,
        "prompt": group.prompt.text,
        "completion": completion.text,
        "tokens": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "reward": _finite(score.reward),
        "parts": {name: _finite(value) for name, value in score.parts.items()},
        "advantage": _finite(advantages.get((group.group_id, completion.sample_index))),
        "status": score.status,
        "error": score.error,
    }
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None

import json
import math
from pathlib import Path

import numpy as np
import pytest

from gyre_core.monitor.completions import select_rollouts, write_completions
from gyre_core.types import Completion, PolicyVersion, Prompt, Rollout, RolloutGroup, Score

VERSION = PolicyVersion(0, 3)


def make_group(name: str, rewards: list[float]) -> RolloutGroup:
    def rollout(index: int, reward: float) -> Rollout:
        tokens, zeros = np.array([1, 2], np.int32), np.zeros(2, np.float32)
        completion = Completion(name, index, tokens, zeros, f"{name} {index}\n\u2028é", "stop", VERSION, 0.0, 1.0)
        scored = math.isfinite(reward)
        score = Score({"f": reward}, reward, "scored" if scored else "failed", "" if scored else "broken")
        return Rollout(completion, score, None)

    prompt = Prompt(name, f"{name}?", f"{name}?", np.array([1], np.int32))
    return RolloutGroup(name, prompt, 12, VERSION, tuple(rollout(*pair) for pair in enumerate(rewards)))


def rewards_of(groups: list[RolloutGroup], count: int) -> list[float]:
    return [rollout.score.reward for _, rollout in select_rollouts(groups, count)]


def test_samples_are_spread_over_the_ranking_from_best_to_worst():
    groups = [make_group("a", [3.0, 0.0, 4.0]), make_group("b", [1.0, 2.0])]
    assert rewards_of(groups, 1) == [4.0]
    assert rewards_of(groups, 2) == [4.0, 0.0]
    assert rewards_of(groups, 3) == [4.0, 2.0, 0.0]
    assert rewards_of(groups, 9) == [4.0, 3.0, 2.0, 1.0, 0.0]
    assert rewards_of(groups, 0) == []
    assert rewards_of([], 3) == []


def test_failed_rows_only_fill_places_that_are_left():
    groups = [make_group("a", [math.nan, 1.0, 0.0])]
    assert rewards_of(groups, 2) == [1.0, 0.0]
    assert rewards_of(groups, 3)[:2] == [1.0, 0.0]
    assert math.isnan(rewards_of(groups, 3)[2])


def test_the_file_shows_prompt_completion_reward_and_advantage(tmp_path: Path):
    groups = [make_group("a", [1.0, math.nan])]
    for _ in range(2):
        write_completions(tmp_path, 12, groups, {("a", 0): np.float32(0.5)}, count=4)
    text = (tmp_path / "completions" / "step-00000012.jsonl").read_text()
    best, failed = [json.loads(line, parse_constant=pytest.fail) for line in text.strip("\n").split("\n")]
    assert best == {
        "step": 12,
        "version": "0000-00000003",
        "group_id": "a",
        "sample_index": 0,
        "prompt": "a?",
        "completion": "a 0\n\u2028é",
        "tokens": 2,
        "finish_reason": "stop",
        "reward": 1.0,
        "parts": {"f": 1.0},
        "advantage": 0.5,
        "status": "scored",
        "error": "",
    }
    assert (failed["reward"], failed["advantage"], failed["status"], failed["error"]) == (
        None,
        None,
        "failed",
        "broken",
    )


def test_no_samples_no_file(tmp_path: Path):
    write_completions(tmp_path, 1, [make_group("a", [1.0])], {}, count=0)
    assert list(tmp_path.iterdir()) == []

"""Scoring in several processes, with verl's functions, with step and version, and with judges."""

import asyncio
import contextlib
import dataclasses
import math
import textwrap
import threading
import time

import numpy as np
import pytest

from gyre_core.config.sections import RewardConfig, RewardFunctionConfig
from gyre_core.monitor.names import find_metric
from gyre_core.rewards.calls import FunctionCall
from gyre_core.rewards.runner import function_names
from gyre_core.rewards.scorer import Scorer
from gyre_core.rewards.values import RewardError
from gyre_core.types import Completion, PolicyVersion, Prompt

VERSION = PolicyVersion(3, 41)


def group(number, texts, *, prompt=None, **columns):
    """A prompt and one completion for each text."""
    row = Prompt(f"p{number}", prompt or "ask", f"<think>{number}", np.arange(3, dtype=np.int32), columns)
    ids, zeros = np.array([7], np.int32), np.zeros(1, np.float32)
    return row, [
        Completion(f"g{number}", index, ids, zeros, text, "stop", VERSION, 0.0, 1.0) for index, text in enumerate(texts)
    ]


@pytest.fixture
def scoring(tmp_path):
    """Open a scorer of functions in a source text: `async with scoring(source, *paths, **settings) as scorer`."""

    @contextlib.asynccontextmanager
    async def open_scorer(source, *paths, signature="trl", **settings):
        (tmp_path / "judge.py").write_text(textwrap.dedent(source))
        entries = tuple(RewardFunctionConfig(path=path, signature=signature) for path in paths or ("judge.py:judge",))
        scorer = Scorer(RewardConfig(functions=entries, **settings), tmp_path)
        try:
            await scorer.start()
            yield scorer
        finally:
            scorer.close()

    return open_scorer


async def score(scorer, *groups):
    return [score for scores in await scorer.score(groups, step=5, version=VERSION) for score in scores]


def test_a_call_is_split_without_loss_or_repetition():
    for rows in range(1, 12):
        call = FunctionCall("f", rows, {"completions": [*range(rows)]}, {"step": 3})
        for parts in range(1, 8):
            split = call.split(parts)
            assert len(split) == min(parts, rows)
            assert [value for part in split for value in part.columns["completions"]] == [*range(rows)]
            assert max(part.rows for part in split) - min(part.rows for part in split) <= 1
            assert all(part.arguments()["step"] == 3 for part in split)


async def test_processes_run_a_function_at_the_same_time(scoring):
    # Each call waits until the other process has begun its own.
    source = """
        import os, pathlib, time
        def judge(completions):
            here = pathlib.Path(__file__).parent
            (here / f"began-{os.getpid()}").touch()
            while len(list(here.glob("began-*"))) < 2:
                time.sleep(0.01)
            return [float(completion) for completion in completions]
    """
    async with scoring(source, processes=2, timeout=30.0) as scorer:
        scores = await score(scorer, group(0, "0123"), group(1, "456"))
    assert [row.reward for row in scores] == [float(number) for number in range(7)]


def test_hung_mathematics_is_killed_from_a_thread_and_both_processes_come_back(tmp_path):
    pytest.importorskip("math_verify")
    timeout = 2.0
    (tmp_path / "judge.py").write_text(
        "import os, time\ndef process(completions):\n    time.sleep(0.2)\n    return [os.getpid() for _ in completions]"
    )
    functions = (RewardFunctionConfig(path="math_answer"), RewardFunctionConfig(path="judge.py:process", weight=0.0))
    answers = [r"\boxed{9^{9^{9^9}}}" if number in (4, 15) else rf"\boxed{{{number}}}" for number in range(20)]
    groups = [group(number, [text], answer=str(number)) for number, text in enumerate(answers)]
    result = {}

    async def run():
        scorer = Scorer(RewardConfig(functions=functions, processes=2, timeout=timeout, retries=1), tmp_path)
        try:
            await scorer.start()
            result["scores"] = await score(scorer, *groups)
            result["counts"], result["metrics"] = dataclasses.replace(scorer.counts["math_answer"]), scorer.metrics()
            result["again"] = await score(scorer, *groups[5:15])
            result["later"] = scorer.metrics()
        finally:
            scorer.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    thread.join()
    scores = result["scores"]
    assert [row.status for row in scores] == ["failed" if number in (4, 15) else "scored" for number in range(20)]
    assert all(row.parts["math_answer"] == 1.0 for row in scores if row.status == "scored")
    assert "no answer within 2 s; the process was killed" in scores[4].error
    # In each process its half of the rows, and then the bad row alone.
    assert (result["counts"].scored, result["counts"].failed, result["counts"].timeouts) == (18, 2, 4)
    assert result["metrics"]["rewards/math_answer/timeouts"] == 4.0
    assert result["metrics"]["rewards/process/timeouts"] == 0.0
    assert result["later"] == dict.fromkeys(result["metrics"], 0.0)
    assert len({row.parts["process"] for row in result["again"]}) == 2


async def test_a_hang_ends_by_its_deadline(scoring):
    async with scoring("def judge(completions): 9 ** 9 ** 9 ** 9", timeout=1.0, retries=0) as scorer:
        started = time.monotonic()
        assert (await score(scorer, group(0, "a")))[0].status == "failed"
        assert time.monotonic() - started < 1.0 + 1.0


async def test_closing_ends_the_calls_of_every_process(scoring, tmp_path):
    source = """
        import os, pathlib, time
        def judge(completions):
            pathlib.Path(__file__).with_name(f"began-{os.getpid()}").touch()
            time.sleep(1000)
    """
    async with scoring(source, processes=2, timeout=1000.0) as scorer:
        call = asyncio.create_task(score(scorer, group(0, "abcd")))
        while len(list(tmp_path.glob("began-*"))) < 2:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(scorer.close)
        with pytest.raises(RewardError, match="is closed"):
            await call
        with pytest.raises(RewardError, match="are closed"):
            await score(scorer, group(0, "a"))


async def test_step_version_and_prompt_texts_come_by_name_alone(scoring):
    source = """
        def judge(completions, step, version, prompt_texts):
            assert prompt_texts == ["<think>0", "<think>0", "<think>1"][-len(completions):]
            return [100 * step + version for _ in completions]
        def everything(completions, **rest):
            assert not {"step", "version", "prompt_texts", "finish_reasons"} & set(rest)
            return [0 for _ in completions]
        def column(completions, **rest):
            return [0 for _ in completions]
    """
    async with scoring(source, "judge.py:judge", "judge.py:everything") as scorer:
        scores = await score(scorer, group(0, "ab"), group(1, "c"))
        assert [row.reward for row in scores] == [541.0] * 3
        with pytest.raises(ValueError, match="'step' has the name of an argument"):
            scorer.check_columns(["step"])
    async with scoring(source, "judge.py:column") as scorer:
        scorer.check_columns(["step", "version"])


async def test_rows_scored_again_alone_keep_step_and_version(scoring):
    source = """
        def judge(completions, step, version):
            assert "bad" not in completions
            return [step + version for _ in completions]
    """
    async with scoring(source) as scorer:
        scores = await score(scorer, group(0, ["a", "bad"]), group(1, ["c"]))
    assert [row.status for row in scores] == ["scored", "failed", "scored"]
    assert scores[2].reward == 46.0


async def test_an_async_function_runs_its_rows_together(scoring):
    # No row is answered before all have asked.
    source = """
        import asyncio
        async def judge(completions):
            asked = asyncio.Barrier(len(completions))
            async def ask(completion):
                await asked.wait()
                return float(completion)
            return await asyncio.gather(*map(ask, completions))
    """
    async with scoring(source, timeout=30.0) as scorer:
        scores = await score(scorer, group(0, [str(number) for number in range(64)]))
    assert [row.reward for row in scores] == [float(number) for number in range(64)]


VERL = {"data_source": "sums", "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"index": 7}}


async def test_functions_of_verl_get_what_verl_gives_them(scoring):
    source = """
        def judge(data_source, solution_str, ground_truth, extra_info=None):
            assert (data_source, extra_info) == ("sums", {"index": 7})
            return float(solution_str == ground_truth)
        def grade(data_source, solution_str, ground_truth, extra_info):
            return {"score": len(solution_str), "format": 1.0}
        def bare(solution_str, ground_truth):
            return True
    """
    paths = ("judge.py:judge", "judge.py:grade", "judge.py:bare")
    groups = [group(0, ["4", "five"], **VERL), group(1, ["4"], prompt=[{"role": "user", "content": "2+2"}], **VERL)]
    async with scoring(source, *paths, signature="verl") as scorer:
        scorer.check_columns(["data_source", "reward_model", "extra_info"])
        with pytest.raises(ValueError, match=r"'judge' needs the column 'reward_model'.*its columns: 'data_source'"):
            scorer.check_columns(["data_source"])
        scores = await score(scorer, *groups)
    assert [dict(row.parts) for row in scores] == [
        {"judge": 1.0, "grade": 1.0, "bare": 1.0},
        {"judge": 0.0, "grade": 4.0, "bare": 1.0},
        {"judge": 1.0, "grade": 1.0, "bare": 1.0},
    ]


async def test_verl_rows_fail_and_abstain_like_others(scoring):
    source = """
        import asyncio
        async def judge(data_source, solution_str, ground_truth, extra_info=None):
            await asyncio.sleep(0)
            assert extra_info is None
            return {"a": {"score": 1}, "b": {"points": 1}, "c": float("nan"), "d": None}[solution_str]
    """
    columns = {key: VERL[key] for key in ("data_source", "reward_model")}
    unjudged = {"data_source": "sums", "reward_model": None}
    async with scoring(source, signature="verl") as scorer:
        scores = await score(scorer, group(0, "abcd", **columns), group(1, "a", **unjudged))
        lacking = await score(scorer, group(0, "a", data_source="sums", reward_model={"style": "model"}))
    assert [row.status for row in scores] == ["scored", "failed", "failed", "abstained", "abstained"]
    assert "{'points': 1} (dict)" in scores[1].error
    assert "lacks 'ground_truth'" in lacking[0].error


async def test_a_function_that_verl_cannot_call_stops_the_start(scoring):
    with pytest.raises(ValueError, match=r"signature verl hands over .* requires 'completions' besides"):
        async with scoring("def judge(completions): return []", signature="verl"):
            pass


class LengthJudge:
    """Scores the length; cannot score `bad`, and abstains from nothing at all."""

    def score(self, pairs):
        assert threading.current_thread() is not threading.main_thread()
        values = {"bad": "it is bad", "": None}
        return [values.get(completion.text, float(len(completion.text))) for _, completion in pairs]


async def test_judges_score_beside_functions(scoring):
    async with scoring("def judge(completions): return [1] * len(completions)") as scorer:
        scorer.add_judge("reward_model", 0.5, LengthJudge())
        scores = await score(scorer, group(0, ["ab", "bad"]), group(1, ["", "abcd"]))
        assert scorer.metrics()["rewards/reward_model/failed"] == 1.0
        with pytest.raises(ValueError, match="a reward function is named 'judge'"):
            scorer.add_judge("judge", 1.0, LengthJudge())
    assert [row.status for row in scores] == ["scored", "failed", "scored", "scored"]
    assert [row.reward for row in scores if row.status == "scored"] == [2.0, 1.0, 3.0]
    assert dict(scores[0].parts) == {"judge": 1.0, "reward_model": 2.0}
    assert math.isnan(scores[1].reward)
    assert scores[1].error == "it is bad"


async def test_a_judge_alone_needs_no_process_and_stops_a_run_that_it_cannot_score(tmp_path):
    scorer = Scorer(RewardConfig(functions=()), tmp_path)
    try:
        await scorer.start()
        scorer.check_columns(["answer"])
        scorer.add_judge("reward_model", 2.0, LengthJudge())
        assert [row.reward for row in await score(scorer, group(0, ["abc"]))] == [6.0]
        with pytest.raises(RewardError, match=r"'reward_model' failed on all 2 .*: it is bad"):
            await score(scorer, group(0, ["bad"]), group(1, ["bad"]))
    finally:
        scorer.close()


def test_functions_of_one_name_go_by_their_paths_and_every_metric_of_theirs_is_registered():
    paths = ["/home/me/a.py:form", "/home/me/b.py:form", "package.module:other"]
    config = RewardConfig(functions=tuple(RewardFunctionConfig(path=path) for path in paths))
    names = function_names(config)
    assert names == dict(zip(["home.me.a.py:form", "home.me.b.py:form", "other"], paths, strict=True))
    for name in names:
        assert find_metric(f"rewards/{name}/mean").name == "rewards/{function}/mean"
        assert find_metric(f"rewards/{name}/timeouts").name == "rewards/{function}/timeouts"

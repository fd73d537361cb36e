"""Scoring in a real process: every way in which a reward function can go wrong, and what becomes of its rows."""

import asyncio
import contextlib
import json
import math
import textwrap

import numpy as np
import pytest

from gyre_core.config.sections import RewardConfig, RewardFunctionConfig
from gyre_core.rewards.runner import function_names
from gyre_core.rewards.scorer import Scorer
from gyre_core.rewards.values import RewardError
from gyre_core.types import Completion, PolicyVersion, Prompt

VERSION = PolicyVersion(1, 2)


def group(number, texts, *, prompt=None, finish_reason="stop", **columns):
    """A prompt and one completion for each text."""
    row = Prompt(f"p{number}", prompt or f"prompt {number}", f"prompt {number}", np.arange(3, dtype=np.int32), columns)
    ids, zeros = np.array([7, number], np.int32), np.zeros(2, np.float32)
    return row, [
        Completion(f"g{number}", index, ids, zeros, text, finish_reason, VERSION, 0.0, 1.0)
        for index, text in enumerate(texts)
    ]


def rows(texts):
    """Two groups that share the texts between them."""
    half = len(texts) // 2
    return [group(0, texts[:half]), group(1, texts[half:])]


@pytest.fixture
def scoring(tmp_path):
    """Open a scorer of functions in a source text: `async with scoring(source, *names, **settings) as scorer`."""

    @contextlib.asynccontextmanager
    async def open_scorer(source, *names, **settings):
        (tmp_path / "judge.py").write_text(textwrap.dedent(source))
        functions = tuple(RewardFunctionConfig(path=f"judge.py:{name}") for name in names or ("judge",))
        scorer = Scorer(RewardConfig(functions=functions, **settings), tmp_path)
        try:
            await scorer.start()
            yield scorer
        finally:
            scorer.close()

    return open_scorer


async def score(scorer, groups):
    return [score for scores in await scorer.score(groups, step=5, version=VERSION) for score in scores]


async def test_functions_get_what_they_ask_for(scoring, tmp_path):
    source = """
        import json, pathlib

        def plain(prompts, completions, completion_ids, answer, finish_reasons, level=0, absent="default"):
            pathlib.Path(__file__).with_name("plain.json").write_text(json.dumps(
                [prompts, completions, completion_ids, answer, finish_reasons, level, absent]))
            return [1] * len(prompts)

        def everything(completions, **rest):
            assert sorted(rest) == ["answer", "completion_ids", "level", "prompts"], sorted(rest)
            return [float(completion == "b") for completion in completions]
    """
    groups = [
        group(0, ["a", "b"], answer="x", level=3),
        group(1, ["c"], answer=None, level=4, finish_reason="length", only_here=1),
    ]
    async with scoring(source, "plain", "everything") as scorer:
        scorer.check_columns(["answer", "level"])
        with pytest.raises(ValueError, match=r"'plain' needs the column 'answer'.*'solution'"):
            scorer.check_columns(["solution"])
        scores = await scorer.score(groups, step=0, version=VERSION)
    assert json.loads((tmp_path / "plain.json").read_text()) == [
        ["prompt 0", "prompt 0", "prompt 1"],
        ["a", "b", "c"],
        [[7, 0], [7, 0], [7, 1]],
        ["x", "x", None],
        ["stop", "stop", "length"],
        [3, 3, 4],
        "default",
    ]
    assert [[row.reward for row in scored] for scored in scores] == [[1.0, 2.0], [1.0]]
    assert dict(scores[0][1].parts) == {"plain": 1.0, "everything": 1.0}


async def test_message_prompts_give_message_completions(scoring):
    source = """
        def judge(prompts, completions):
            assert prompts[0] == [{"role": "user", "content": "hi"}]
            assert all(message["role"] == "assistant" for (message,) in completions)
            return [len(message["content"]) for (message,) in completions]
    """
    groups = [group(0, ["ab", "abc"], prompt=[{"role": "user", "content": "hi"}])]
    async with scoring(source) as scorer:
        assert [row.reward for row in await score(scorer, groups)] == [2.0, 3.0]


async def test_async_functions_are_awaited_on_one_loop(scoring):
    source = """
        import asyncio
        loops = set()

        async def one(completion):
            await asyncio.sleep(0)
            return float(completion)

        async def judge(completions):
            loops.add(asyncio.get_running_loop())
            assert len(loops) == 1
            return await asyncio.gather(*map(one, completions))
    """
    async with scoring(source) as scorer:
        for _ in range(2):
            assert [row.reward for row in await score(scorer, rows(["0", "1", "2.5", "3"]))] == [0.0, 1.0, 2.5, 3.0]


async def test_what_functions_print_disturbs_nothing(scoring):
    source = """
        import os, sys
        print("at import")

        def judge(completions):
            print('{"outcomes": [9, 9]}' * 1000)
            print("garbage \\xff", file=sys.stderr)
            os.write(1, bytes(range(256)) * 1000)
            os.write(2, b"more" * 100_000)
            return [1.0 for _ in completions]
    """
    async with scoring(source) as scorer:
        for _ in range(3):
            assert [row.reward for row in await score(scorer, rows(["a", "b"]))] == [1.0, 1.0]


@pytest.mark.parametrize("returned", ["[1.0]", "[1.0] * 3", "1.0", "'good'", "[1.0] * 5"])
async def test_a_wrong_count_is_never_spread_over_the_rows(scoring, returned):
    async with scoring(f"def judge(completions): return {returned}") as scorer:
        with pytest.raises(RewardError, match=r"'judge' returned.*wanted") as error:
            await score(scorer, rows(["a", "b", "c", "d"]))
    assert "4" in str(error.value)


async def test_none_abstains_nan_fails_and_zero_stays(scoring):
    source = """
        VALUES = {"one": 1, "none": None, "zero": 0.0, "nan": float("nan"), "text": "good", "true": True}
        def judge(completions): return [VALUES[completion] for completion in completions]
    """
    async with scoring(source) as scorer:
        scores = await score(scorer, rows(["one", "none", "zero", "nan", "text", "true"]))
        counts = scorer.counts["judge"]
    assert [row.status for row in scores] == ["scored", "abstained", "scored", "failed", "failed", "scored"]
    assert [row.reward for row in scores if row.status == "scored"] == [1.0, 0.0, 1.0]
    assert all(math.isnan(row.reward) for row in scores if row.status != "scored")
    assert "nan" in scores[3].error
    assert "'good'" in scores[4].error
    assert (counts.scored, counts.abstained, counts.failed, counts.retried) == (3, 1, 2, 2)


async def test_all_rows_may_abstain(scoring):
    async with scoring("def judge(completions): return [None for _ in completions]") as scorer:
        assert [row.status for row in await score(scorer, rows(["a", "b", "c", "d"]))] == ["abstained"] * 4


async def test_rows_that_raise_do_not_sink_the_others(scoring):
    source = """
        def judge(completions): return [1 / int(completion) for completion in completions]
    """
    texts = ["0" if number % 20 == 7 else "2" for number in range(100)]
    async with scoring(source) as scorer:
        scores = await score(scorer, rows(texts))
        counts = scorer.counts["judge"]
    assert [row.status for row in scores] == ["failed" if text == "0" else "scored" for text in texts]
    assert {row.reward for row in scores if row.status == "scored"} == {0.5}
    assert all("ZeroDivisionError" in row.error for row in scores if row.status == "failed")
    assert (counts.scored, counts.failed, counts.retried) == (95, 5, 100)


async def test_without_retries_a_raising_row_fails_its_whole_call(scoring):
    async with scoring("def judge(completions): return [1 / int(c) for c in completions]", retries=0) as scorer:
        assert [row.status for row in await score(scorer, [group(0, ["1", "0", "1"])])] == ["failed"] * 3
        assert scorer.counts["judge"].retried == 0


@pytest.mark.parametrize("raised", ["ConnectionError('503 Service Unavailable')", "SystemExit('503 bye')"])
async def test_a_function_that_always_raises_stops_the_first_request(scoring, raised):
    source = f"""
        def ask():
            raise {raised}
        def judge(completions): return [ask() for _ in completions]
    """
    async with scoring(source) as scorer:
        with pytest.raises(RewardError, match=r"(?s)'judge' failed on all 4.* in step 5.*in ask.*503"):
            await score(scorer, rows(["a", "b", "c", "d"]))


async def test_one_prompt_that_cannot_be_scored_fails_alone(scoring):
    async with scoring("def judge(completions): return [1 / 0 for _ in completions]") as scorer:
        assert [row.status for row in await score(scorer, [group(0, ["a", "b"])])] == ["failed"] * 2


async def test_a_scorer_that_recovers_is_believed(scoring):
    source = """
        calls = []
        def judge(completions):
            calls.append(1)
            if len(calls) == 1:
                raise ConnectionError("503 Service Unavailable")
            return [0.0 for _ in completions]
    """
    async with scoring(source) as scorer:
        scores = await score(scorer, rows(["a", "b", "c", "d"]))
    assert [(row.status, row.reward) for row in scores] == [("scored", 0.0)] * 4


@pytest.mark.parametrize("hang", ["while True: pass", "9 ** 9 ** 9 ** 9", "threading.Event().wait()"])
async def test_hung_rows_are_killed_and_the_others_scored(scoring, hang):
    source = f"""
        import threading
        def judge(completions):
            if "hang" in completions:
                {hang}
            return [1.0 for _ in completions]
    """
    texts = ["hang" if number in (3, 14) else "fine" for number in range(20)]
    async with scoring(source, timeout=1.0) as scorer:
        scores = await score(scorer, rows(texts))
        counts = scorer.counts["judge"]
        assert (counts.scored, counts.failed, counts.timeouts) == (18, 2, 3)
        assert [row.reward for row in await score(scorer, rows(["fine"] * 2))] == [1.0, 1.0]
    assert [row.status for row in scores] == ["failed" if text == "hang" else "scored" for text in texts]
    assert "no answer within 1 s; the process was killed" in scores[3].error


async def test_a_function_that_hangs_on_everything_is_given_up(scoring):
    source = """
        import time
        def judge(completions):
            print("asking the judge", flush=True)
            time.sleep(1000)
    """
    async with scoring(source, timeout=0.5) as scorer:
        with pytest.raises(RewardError, match=r"(?s)failed on all 100.*no answer within 0.5 s.*asking the judge"):
            await score(scorer, rows(["a"] * 100))
        assert scorer.counts["judge"].timeouts == 4


@pytest.mark.parametrize(
    ("death", "named"),
    [
        ("os._exit(3)", "ended with exit code 3"),
        ("os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
        ("ctypes.string_at(0)", "was ended by SIGSEGV"),
    ],
)
async def test_a_row_that_ends_the_process_fails_alone(scoring, death, named):
    source = f"""
        import ctypes, os, sys
        def judge(completions):
            if "die" in completions:
                print("last words", file=sys.stderr)
                {death}
            return [1.0 for _ in completions]
    """
    async with scoring(source) as scorer:
        scores = await score(scorer, rows(["a", "die", "c", "d"]))
    assert [row.status for row in scores] == ["scored", "failed", "scored", "scored"]
    assert named in scores[1].error
    assert "last words" in scores[1].error


async def test_several_functions_are_weighed(tmp_path):
    (tmp_path / "judge.py").write_text("def short(completions): return [None if c == '?' else 2 for c in completions]")
    functions = (
        RewardFunctionConfig(path="exact_match", weight=3.0),
        RewardFunctionConfig(path="judge.py:short", weight=-0.5),
    )
    scorer = Scorer(RewardConfig(functions=functions), tmp_path)
    try:
        await scorer.start()
        (scores,) = await scorer.score([group(0, ["4", "5", "?"], answer="4")], step=0, version=VERSION)
    finally:
        scorer.close()
    assert [row.reward for row in scores] == [2.0, -1.0, 0.0]
    assert dict(scores[2].parts) == {"exact_match": 0.0, "short": None}


async def test_a_function_that_cannot_be_loaded_stops_the_start(tmp_path):
    for path, message in [("judge.py:f", "there is no file"), ("partial", "write package.module:function")]:
        scorer = Scorer(RewardConfig(functions=(RewardFunctionConfig(path=path),)), tmp_path)
        with pytest.raises(ValueError, match=message):
            await scorer.start()
        scorer.close()


async def test_calls_take_turns(scoring):
    source = """
        import time
        busy = []
        def judge(completions):
            assert not busy
            busy.append(1)
            time.sleep(0.01)
            busy.clear()
            return [float(completion) for completion in completions]
    """
    async with scoring(source) as scorer:
        requests = [rows([str(number)] * 4) for number in range(8)]
        results = await asyncio.gather(*(score(scorer, request) for request in requests))
    assert [[row.reward for row in result] for result in results] == [[float(number)] * 4 for number in range(8)]


async def test_closing_ends_a_call_in_flight(scoring, tmp_path):
    source = """
        import pathlib, time
        def judge(completions):
            pathlib.Path(__file__).with_name("called").touch()
            time.sleep(1000)
    """
    async with scoring(source, timeout=1000.0) as scorer:
        call = asyncio.create_task(score(scorer, rows(["a", "b"])))
        while not (tmp_path / "called").exists():
            await asyncio.sleep(0.01)
        scorer.close()
        with pytest.raises(RewardError, match="is closed"):
            await call


async def test_empty_requests_have_no_scores(scoring):
    async with scoring("def judge(completions): return []") as scorer:
        assert await scorer.score([], step=0, version=VERSION) == []
        assert await scorer.score([group(0, [])], step=0, version=VERSION) == [[]]


def test_names_are_short_where_they_can_be():
    def names(*paths):
        return function_names(RewardConfig(functions=tuple(RewardFunctionConfig(path=path) for path in paths)))

    assert names("a.b:good", "partial_match") == {"good": "a.b:good", "partial_match": "partial_match"}
    assert list(names("a:good", "b:good", "c:bad")) == ["a:good", "b:good", "bad"]
    with pytest.raises(ValueError, match="'a:good' is given twice"):
        names("a:good", "a:good")

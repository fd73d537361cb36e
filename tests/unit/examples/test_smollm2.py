"""The SmolLM2 examples: prompts, rewards by values worked out by hand, and what the model makes of the prompts."""

import json
import runpy
from pathlib import Path

import pytest

from gyre_core.config.loading import load_config
from gyre_core.policy.models import load_policy
from gyre_core.policy.tokens import render_prompt

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/smollm2"
MODEL = ROOT / "models/smollm2-135m-instruct"
DATA = runpy.run_path(str(EXAMPLE / "make_data.py"))
REWARD = runpy.run_path(str(EXAMPLE / "reward.py"))

REVERSALS = [  # completion, answer, finish reason, reward
    ("c, b, a", "c, b, a", "stop", 1.0),
    (" c, b, a\n", "c, b, a", "stop", 1.0),
    ("a, b, c", "c, b, a", "stop", 0.5 / 3),
    ("d, c, a, b", "d, c, b, a", "stop", 0.5 * 2 / 4),
    ("c, b", "c, b, a", "stop", 0.5 * 2 / 3),
    ("c, b, a, a", "c, b, a", "stop", 0.5 * 3 / 4),
    ("c b a", "c, b, a", "stop", 0.0),
    ("", "c, b, a", "stop", 0.0),
    ("c, b, a", "c, b, a", "length", 0.0),
]
SENTENCES = [  # completion, topic, finish reason, reward
    ("Owls hunt at night.", "owls", "stop", 1.0),
    ("All owls of the north hunt at night!", "owls", "stop", 1.0),
    ("One two three owls five six seven eight nine.", "owls", "stop", 11 / 12),
    (" ".join(["owls"] * 14) + ".", "owls", "stop", 0.5),
    (" ".join(["owls"] * 20) + ".", "owls", "stop", 0.0),
    (" ".join(["owls"] * 30) + ".", "owls", "stop", 0.0),
    ("Owls hunt.", "owls", "stop", 0.0),
    ("Birds hunt at night.", "owls", "stop", 0.0),
    ("Bowls are round things.", "owls", "stop", 0.0),
    ("Owls hunt at night", "owls", "stop", 0.0),
    ("Owls hunt. At night they see.", "owls", "stop", 0.0),
    ("Owls hunt\nat night.", "owls", "stop", 0.0),
    ("", "owls", "stop", 0.0),
    ("Owls hunt at night.", "owls", "length", 0.0),
]


@pytest.mark.parametrize(("completion", "answer", "reason", "reward"), REVERSALS)
def test_reversal_by_hand(completion, answer, reason, reward):
    messages = [{"role": "assistant", "content": completion}]
    assert REWARD["reversal"]([messages], [answer], [reason], step=1) == [pytest.approx(reward)]


@pytest.mark.parametrize(("completion", "topic", "reason", "reward"), SENTENCES)
def test_short_sentence_by_hand(completion, topic, reason, reward):
    messages = [{"role": "assistant", "content": completion}]
    assert REWARD["short_sentence"]([messages], [topic], [reason], step=1) == [pytest.approx(reward)]


@pytest.mark.parametrize("kind", ["reversal_rows", "sentence_rows"])
def test_rows_follow_the_seed_and_held_out_ones_are_apart(kind):
    training, held_out = DATA[kind](3)
    assert (training, held_out) == DATA[kind](3) != DATA[kind](4)
    texts = [json.dumps(row["prompt"]) for row in training + held_out]
    assert len(training) >= 512
    assert 64 <= len(held_out) <= 128
    assert len(set(texts)) == len(texts)


def test_lists_are_of_three_or_four_distinct_words_and_the_answer_is_their_reverse():
    training, held_out = DATA["reversal_rows"](0)
    for row in training + held_out:
        words = row["prompt"][-1]["content"].removeprefix("Reverse: ").split(", ")
        assert len(set(words)) == len(words) in (3, 4)
        assert all(len(word) == 5 for word in words)
        assert row["answer"].split(", ") == words[::-1]


def test_held_out_topics_are_never_trained_on_and_every_request_names_its_own():
    training, held_out = DATA["sentence_rows"](0)
    assert not {row["topic"] for row in training} & {row["topic"] for row in held_out}
    assert all(row["topic"] in row["prompt"][-1]["content"] for row in training + held_out)


def test_solved_examples_and_answers_earn_the_whole_reward():
    training, _ = DATA["reversal_rows"](0)
    for row in training[:8]:
        replies = [[message] for message in row["prompt"] if message["role"] == "assistant"]
        asked = [message["content"] for message in row["prompt"] if message["role"] == "user"]
        answers = [", ".join(text.removeprefix("Reverse: ").split(", ")[::-1]) for text in asked]
        completions = [*replies, [{"role": "assistant", "content": row["answer"]}]]
        assert REWARD["reversal"](completions, answers, ["stop"] * 3) == [1.0] * 3


@pytest.mark.skipif(not MODEL.is_dir(), reason="the model is not there; `make smollm2` makes it")
@pytest.mark.parametrize("name", ["reverse", "sentence"])
def test_prompts_and_answers_fit_the_model(name, tmp_path):
    config = load_config(EXAMPLE / f"{name}.yaml")
    policy = load_policy(config.models, seed=0)
    training, _ = DATA["reversal_rows" if name == "reverse" else "sentence_rows"](0)
    for row in training[:64]:
        text, token_ids = render_prompt(policy.tokenizer, row["prompt"])
        assert "You are a helpful AI assistant" not in text
        assert text.endswith("<|im_start|>assistant\n")
        assert policy.tokenizer.decode(token_ids) == text
        if name == "reverse":
            answer = policy.tokenizer(row["answer"], add_special_tokens=False)["input_ids"]
            assert len(answer) + 1 <= config.rollout.max_tokens
    assert policy.tokens.pad_id in policy.tokens.eos_ids

"""Every variant of the algorithm learns: a toy policy comes to prefer the tokens that are paid for.

No engine: three tokens are drawn one after the other from plain forward passes. The reward is the share of tokens
of the lower half of the vocabulary, so a random policy earns about a half.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from learner_cases import make_learner, make_ppo_learner, minibatch, sampling, toy_model

from gyre_core.algorithms.advantages import group_advantages, leave_one_out_advantages
from gyre_core.types import PolicyVersion, TrainingGroup

VOCABULARY, LENGTH, PROMPTS, SAMPLES, STEPS = 8, 3, 8, 8, 12

GRPO = {
    "grpo": {},
    "dr-grpo": {"loss_aggregation": "constant", "scale_advantages": False},
    "dapo": {"clip_high": 0.28, "mask_truncated": True},
    "gspo": {"policy_ratio": "sequence", "loss_aggregation": "sequence", "clip_low": 3e-2, "clip_high": 4e-2},
    "rloo": {"advantage": "leave_one_out"},
    "entropy": {"entropy_coef": 0.01},
    "masked-importance": {"importance_mode": "mask"},
    "kl-in-loss": {"kl_coef": 0.02, "kl_estimator": "k2"},
}
PPO = {
    "own": {},
    "shared": {"trunk": "shared"},
    "bootstrap": {"critic": {"truncation": "bootstrap"}},
    "kl-in-reward": {"kl_coef": 0.02, "kl_in": "reward"},
}


def small_model():
    model = toy_model(vocab_size=VOCABULARY)
    model.model.embed_tokens.weight.data.mul_(0.3)  # near uniform, so that there is something to explore
    return model


@torch.no_grad()
def draw(model, prompt, generator):
    """`SAMPLES` completions of `LENGTH` tokens with their log-probabilities."""
    token_ids = torch.from_numpy(prompt).long().expand(SAMPLES, -1)
    chosen = []
    for _ in range(LENGTH):
        scores = model(input_ids=token_ids).logits[:, -1].log_softmax(-1)
        picked = scores.exp().multinomial(1, generator=generator)
        chosen.append(scores.gather(-1, picked)[:, 0])
        token_ids = torch.cat([token_ids, picked], dim=1)
    return token_ids[:, len(prompt) :].numpy().astype(np.int32), torch.stack(chosen, 1).numpy()


def sampled_groups(model, step, generator):
    groups = []
    for index in range(PROMPTS):
        prompt = np.array([index, (index + step) % VOCABULARY], dtype=np.int32)
        completions, behaviour = draw(model, prompt, generator)
        groups.append(
            TrainingGroup(
                group_id=f"{step}-{index}",
                prompt_ids=prompt,
                completions=tuple(completions),
                behaviour=tuple(behaviour),
                reference=tuple(np.full_like(behaviour, -np.log(VOCABULARY))),
                truncated=np.arange(SAMPLES) % 4 == 0,
                rewards=(completions < VOCABULARY // 2).mean(axis=1),
                advantages=np.zeros(SAMPLES, dtype=np.float32),
                version=PolicyVersion(0, step),
            )
        )
    return groups


def learn(model, learner, credit, kl_coef):
    """The mean reward of each step."""
    generator = torch.Generator().manual_seed(1)
    course = []
    for step in range(STEPS):
        groups = sampled_groups(model, step, generator)
        course.append(np.mean([group.rewards.mean() for group in groups]))
        groups = [replace(group, advantages=credit(group.rewards)) for group in groups]
        old = learner.begin_step(groups, on_policy=False)
        for half in (groups[::2], groups[1::2]):
            learner.apply(minibatch(half, lr=1e-2, kl_coef=kl_coef), old)
    return course


def assert_rises(course):
    assert course[0] < 0.65
    assert np.mean(course[-3:]) > 0.85, course


@pytest.mark.parametrize("variant", GRPO)
def test_grpo_variants_learn(variant):
    settings = GRPO[variant]
    model = small_model()
    learner = make_learner(model, sampled=sampling(max_tokens=LENGTH), max_grad_norm=1.0, **settings)

    def credit(rewards):
        if settings.get("advantage") == "leave_one_out":
            return leave_one_out_advantages(rewards)
        return group_advantages(rewards, settings.get("scale_advantages", True))

    assert_rises(learn(model, learner, credit, settings.get("kl_coef", 0.0)))


@pytest.mark.parametrize("variant", PPO)
def test_ppo_variants_learn(variant):
    settings = PPO[variant]
    model = small_model()
    learner, values = make_ppo_learner(model, sampled=sampling(max_tokens=LENGTH), max_grad_norm=1.0, **settings)
    course = learn(model, learner, lambda rewards: rewards.astype(np.float32), settings.get("kl_coef", 0.0))
    assert_rises(course)
    assert torch.isfinite(values.head.weight).all()

"""The learner against an independent GRPO in float64: one unpacked sequence at a time, formulas written out."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from learner_cases import (
    assert_close,
    first_moments,
    gradient_of,
    make_learner,
    minibatch,
    random_groups,
    sampling,
    toy_model,
    weights,
)

from gyre_core.config.sections import LearningConfig


def double_model(model, state):
    doubled = copy.deepcopy(model).double()
    doubled.load_state_dict({name: tensor.double() for name, tensor in state.items()}, strict=False)
    doubled.zero_grad()
    return doubled


def plain_logits(model, prompt, completion, temperature):
    token_ids = torch.tensor(np.concatenate([prompt, completion]), dtype=torch.long)[None]
    return model(input_ids=token_ids).logits[0, len(prompt) - 1 : -1] / temperature


def chosen(logits, completion):
    return torch.log_softmax(logits, -1)[torch.arange(len(completion)), torch.tensor(completion, dtype=torch.long)]


def truncate(logits, top_p, top_k):
    """-inf outside the top-k, then outside the smallest set of mass top_p; loops and sorts, one position at a time."""
    result = torch.full_like(logits, -torch.inf)
    for position, row in enumerate(logits):
        order = row.argsort(descending=True)[: top_k or len(row)]
        shares = torch.softmax(row[order], -1)
        size = next(n for n in range(1, len(order) + 1) if shares[:n].sum() >= top_p or n == len(order))
        result[position, order[:size]] = row[order[:size]]
    return result


class Reference:
    """Old policy at `old_state`, gradient at `new_state`."""

    def __init__(self, model, old_state, sampled, config):
        self.model, self.sampled, self.config = model, sampled, config
        self.old_model = double_model(model, old_state)

    def token_losses(self, model, group, index, kl_coef):
        """Losses of one completion's tokens, and which of them count."""
        prompt, completion = group.prompt_ids, group.completions[index]
        temperature, config = self.sampled.temperature, self.config
        with torch.no_grad():
            old_logits = plain_logits(self.old_model, prompt, completion, temperature)
            old = chosen(old_logits, completion)
            truncated = chosen(truncate(old_logits, self.sampled.top_p, self.sampled.top_k), completion)
            engine = torch.tensor(group.behaviour[index], dtype=torch.float64)
            importance = torch.exp(truncated - engine).clamp(max=config.importance_cap)
            counted = truncated > -torch.inf
        logits = plain_logits(model, prompt, completion, temperature)
        new, advantage = chosen(logits, completion), float(group.advantages[index])
        ratio = torch.exp(new - old)
        if config.policy_ratio == "sequence" and counted.any():
            ratio = torch.exp((new - old)[counted].mean()).expand(len(new))
        bounded = torch.clamp(ratio, 1 - config.clip_low, 1 + config.clip_high)
        losses = -importance * torch.minimum(ratio * advantage, bounded * advantage)
        if group.reference is not None:
            difference = new - torch.tensor(group.reference[index], dtype=torch.float64)
            estimators = {"k1": difference, "k2": difference**2 / 2, "k3": torch.exp(-difference) - 1 + difference}
            losses = losses + kl_coef * estimators[config.kl_estimator]
        distribution = torch.softmax(logits, -1)
        losses = losses + config.entropy_coef * (distribution * torch.log(distribution)).sum(-1)
        return group.weight * losses, counted

    def gradient(self, new_state, groups, kl_coef):
        model = double_model(self.model, new_state)
        sequences = [
            losses[counted]
            for group in groups
            for index in range(len(group.completions))
            for losses, counted in [self.token_losses(model, group, index, kl_coef)]
        ]
        if self.config.loss_aggregation == "token":
            loss = sum(losses.sum() for losses in sequences) / sum(len(losses) for losses in sequences)
        elif self.config.loss_aggregation == "sequence":
            counted = [losses for losses in sequences if len(losses)]
            loss = sum(losses.mean() for losses in counted) / len(counted)
        else:
            loss = sum(losses.sum() for losses in sequences) / (len(sequences) * self.sampled.max_tokens)
        loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}, float(loss.detach())


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize(
    ("settings", "sampled", "kl_coef"),
    [
        ({"loss_aggregation": "token", "kl_estimator": "k3"}, {}, 0.3),
        ({"loss_aggregation": "sequence", "kl_estimator": "k2"}, {"temperature": 0.7, "top_p": 0.9}, 0.3),
        ({"loss_aggregation": "constant", "kl_estimator": "k1"}, {"temperature": 1.5, "top_k": 18}, 0.1),
        ({"loss_aggregation": "token"}, {"temperature": 0.8, "top_p": 0.95, "top_k": 20}, 0.0),
        ({"loss_aggregation": "sequence", "policy_ratio": "sequence", "clip_low": 0.05}, {"top_p": 0.9}, 0.0),
        ({"loss_aggregation": "token", "entropy_coef": 0.2}, {"temperature": 0.7}, 0.3),
    ],
)
@pytest.mark.parametrize("budget", [20, 4096])
def test_loss_and_gradient_of_an_off_policy_minibatch(kind, settings, sampled, kl_coef, budget):
    model = toy_model(kind)
    learner = make_learner(copy.deepcopy(model), sampled=sampling(**sampled), tokens_per_micro_batch=budget, **settings)
    groups = random_groups(seed=5, reference=kl_coef > 0)
    reference = Reference(model, weights(learner), sampling(**sampled), LearningConfig(**settings))
    old = learner.begin_step(groups, on_policy=False)
    # The first update moves the weights so far that ratios reach their bounds in the second.
    gradient, first = gradient_of(learner, minibatch(groups, lr=3e-3, kl_coef=kl_coef), old)
    expected, loss = reference.gradient(reference.old_model.state_dict(), groups, kl_coef)
    assert_close(gradient, expected, tolerance=1e-4)
    assert first["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
    moved = weights(learner)
    gradient, second = gradient_of(learner, minibatch(groups, kl_coef=kl_coef), old)
    expected, loss = reference.gradient(moved, groups, kl_coef)
    assert second["clip_ratio/region_mean"] > 0.02
    assert_close(gradient, expected, tolerance=1e-4)
    assert second["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)


def test_first_update_is_adamws():
    """Loshchilov and Hutter, 'Decoupled weight decay regularization', 2019: the first step has no history."""
    learner = make_learner(weight_decay=0.1, betas=(0.9, 0.99))
    groups = random_groups(seed=1)
    before = weights(learner)
    learner.apply(minibatch(groups, lr=0.01), learner.begin_step(groups, on_policy=True))
    for name, moment in first_moments(learner).items():
        gradient = moment / 0.1
        expected = before[name] * (1 - 0.01 * 0.1) - 0.01 * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(learner.policy_weights()[name], expected, atol=1e-6, rtol=0)


def test_gradient_is_scaled_down_to_the_largest_norm():
    groups = random_groups(seed=2)
    gradients = {}
    for max_norm in (1e9, 0.01):
        learner = make_learner(max_grad_norm=max_norm)
        gradients[max_norm], metrics = gradient_of(
            learner, minibatch(groups), learner.begin_step(groups, on_policy=True)
        )
    norm = torch.sqrt(sum(tensor.square().sum() for tensor in gradients[1e9].values())).item()
    assert metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert_close(gradients[0.01], {name: t * (0.01 / norm) for name, t in gradients[1e9].items()}, tolerance=1e-5)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_micro_batches_and_order_leave_the_gradient(aggregation):
    groups = random_groups(seed=3, reference=True)

    def run(groups, budget):
        learner = make_learner(loss_aggregation=aggregation, tokens_per_micro_batch=budget)
        old = learner.begin_step(groups, on_policy=False)
        return gradient_of(learner, minibatch(groups, kl_coef=0.2), old)

    expected, expected_metrics = run(groups, 10**6)
    rng = np.random.default_rng(3)
    shuffled = [_reordered(groups[index], rng) for index in rng.permutation(len(groups))]
    for case, budget in ((groups, 1), (groups, 33), (shuffled, 64), (shuffled, 10**6)):
        gradient, metrics = run(case, budget)
        assert_close(gradient, expected, tolerance=2e-6)
        for name in metrics.keys() - {"perf/padding_share"}:
            assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-5, abs=1e-6), name


def _reordered(group, rng):
    order = rng.permutation(len(group.completions))

    def pick(parts):
        return tuple(parts[index] for index in order)

    return replace(
        group,
        completions=pick(group.completions),
        behaviour=pick(group.behaviour),
        reference=pick(group.reference),
        advantages=group.advantages[order],
    )

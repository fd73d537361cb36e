"""The learner with a critic: against an independent PPO in float64, and the laws of the learner without one."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from learner_cases import (
    assert_close,
    assert_equal,
    first_moments,
    gradient_of,
    make_ppo_learner,
    minibatch,
    random_groups,
    toy_model,
    weights,
)
from safetensors.torch import load, save

from gyre_core.policy.value_model import score_values

TRUNKS = pytest.mark.parametrize("trunk", ["own", "shared"])


def scored_groups(seed, **settings):
    """Random groups of which every third completion was cut off."""
    groups = random_groups(seed, **settings)
    return [replace(g, truncated=np.arange(len(g.completions)) % 3 == 1) for g in groups]


def plain_states(model, prompt, completion):
    """Hidden states before each token of a completion and after its last one, `[time + 1, hidden]`."""
    token_ids = torch.tensor(np.concatenate([prompt, completion]), dtype=torch.long)[None]
    return model.base_model(input_ids=token_ids).last_hidden_state[0, len(prompt) - 1 :]


def plain_values(trunk, head, group):
    """Values `[time + 1]` of each completion."""
    return [head(plain_states(trunk, group.prompt_ids, ids))[:, 0] for ids in group.completions]


def doubled(values):
    """Trunk and head in float64, without gradients."""
    parts = copy.deepcopy(values.trunk).double(), copy.deepcopy(values.head).double()
    for part in parts:
        part.zero_grad()
    return parts


def expected_targets(groups, values, *, gamma, decay, bootstrap, penalties=None):
    """Old values, returns and advantages by group, by the sums of the definition."""
    trunk, head = doubled(values)
    targets = []
    for group in groups:
        parts = []
        with torch.no_grad():
            states = [part.numpy() for part in plain_values(trunk, head, group)]
        for index, value in enumerate(states):
            value[-1] *= bool(bootstrap and group.truncated[index])
            rewards = np.zeros(len(value) - 1)
            if penalties is not None:
                rewards -= penalties(group, index)
            rewards[-1] += group.advantages[index]
            deltas = rewards + gamma * value[1:] - value[:-1]
            steps = range(len(deltas))
            advantages = np.array([sum((gamma * decay) ** (k - t) * deltas[k] for k in steps[t:]) for t in steps])
            parts.append((value[:-1], advantages + value[:-1], advantages))
        targets.append(tuple(np.concatenate(column) for column in zip(*parts, strict=True)))
    return targets


@TRUNKS
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("budget", [20, 4096])
def test_values_are_the_heads_on_the_states_that_predict_the_tokens(trunk, kind, budget):
    _, values = make_ppo_learner(toy_model(kind), trunk=trunk)
    groups = random_groups(seed=1)
    scored = score_values(values, [(group.prompt_ids, group.completions) for group in groups], budget)
    double = doubled(values)
    with torch.no_grad():
        expected = torch.cat([part[:-1] for group in groups for part in plain_values(*double, group)])
    torch.testing.assert_close(scored.double(), expected, atol=1e-5, rtol=0)


@TRUNKS
@pytest.mark.parametrize("truncation", ["terminal", "bootstrap"])
def test_targets_at_the_start_of_a_step(trunk, truncation):
    critic = {"gamma": 0.9, "gae_lambda": 0.7, "truncation": truncation, "whiten_advantages": False}
    learner, values = make_ppo_learner(trunk=trunk, critic=critic)
    groups = scored_groups(seed=2)
    old = learner.begin_step([*groups, groups[0]], on_policy=True)
    expected = expected_targets(groups, values, gamma=0.9, decay=0.7, bootstrap=truncation == "bootstrap")
    for group, columns in zip(groups, expected, strict=True):
        part = old.values[group.group_id]
        for actual, column in zip((part.old, part.returns, part.advantages), columns, strict=True):
            np.testing.assert_allclose(actual, column, atol=2e-5)
    flat_values, flat_returns = (np.concatenate([columns[at] for columns in expected]) for at in (0, 1))
    assert old.metrics["critic/value_mean"] == pytest.approx(flat_values.mean(), abs=1e-5)
    assert old.metrics["critic/return_mean"] == pytest.approx(flat_returns.mean(), abs=1e-5)
    explained = 1 - (flat_returns - flat_values).var() / flat_returns.var()
    assert old.metrics["critic/explained_variance"] == pytest.approx(explained, abs=1e-4)


def test_advantages_are_whitened_over_the_distinct_groups():
    learner, values = make_ppo_learner()
    groups = scored_groups(seed=3)
    old = learner.begin_step([*groups, groups[0], groups[0]], on_policy=True)
    expected = np.concatenate([c[2] for c in expected_targets(groups, values, gamma=1.0, decay=0.95, bootstrap=False)])
    actual = np.concatenate([old.values[group.group_id].advantages for group in groups])
    np.testing.assert_allclose(actual, (expected - expected.mean()) / expected.std(), atol=1e-4)


def test_penalty_in_the_reward_is_taken_off_each_token_and_not_in_the_loss():
    groups = scored_groups(seed=4, reference=True)
    settings = {"kl_coef": 0.2, "kl_in": "reward", "critic": {"whiten_advantages": False}}
    learner, values = make_ppo_learner(**settings)
    old = learner.begin_step(groups, on_policy=True)

    def penalties(group, index):
        return 0.2 * (group.behaviour[index].astype(float) - group.reference[index])

    expected = expected_targets(groups, values, gamma=1.0, decay=0.95, bootstrap=False, penalties=penalties)
    for group, columns in zip(groups, expected, strict=True):
        np.testing.assert_allclose(old.values[group.group_id].advantages, columns[2], atol=2e-5)
    gradient, metrics = gradient_of(learner, minibatch(groups, kl_coef=0.2), old)
    assert metrics["kl"] > 0.0
    without, _ = make_ppo_learner(**settings)
    without.begin_step(groups, on_policy=True)
    assert_equal(gradient, gradient_of(without, minibatch(groups, kl_coef=0.0), old)[0])


def test_penalty_in_the_reward_without_reference_is_refused():
    learner, _ = make_ppo_learner(kl_coef=0.2, kl_in="reward")
    with pytest.raises(ValueError, match=r"group-0 carries no reference .* learning\.kl_coef"):
        learner.begin_step(random_groups(seed=4), on_policy=True)


def double_losses(policy, trunk, head, groups, old, config, clip):
    """Policy and value loss, means over all tokens, in float64 with autograd; all ratios and values written out."""
    policy_sum, value_sum, count = 0.0, 0.0, 0
    for group in groups:
        part, start = old.values[group.group_id], 0
        for ids, behaviour in zip(group.completions, group.behaviour, strict=True):
            own = slice(start, start := start + len(ids))
            states = plain_states(policy, group.prompt_ids, ids)[:-1]
            logits = policy.lm_head(states)
            new = torch.log_softmax(logits, -1)[torch.arange(len(ids)), torch.tensor(ids, dtype=torch.long)]
            ratio = torch.exp(new - torch.tensor(behaviour, dtype=torch.float64))
            bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
            advantages, returns, before = (
                torch.tensor(column[own], dtype=torch.float64) for column in (part.advantages, part.returns, part.old)
            )
            policy_sum = policy_sum - group.weight * torch.minimum(ratio * advantages, bounded * advantages).sum()
            value_states = states if trunk is policy else plain_states(trunk, group.prompt_ids, ids)[:-1]
            value = head(value_states)[:, 0]
            near = before + (value - before).clamp(-clip, clip)
            value_sum = (
                value_sum + group.weight * 0.5 * torch.maximum((value - returns) ** 2, (near - returns) ** 2).sum()
            )
            count += len(ids)
    return policy_sum / count, value_sum / count


@TRUNKS
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("budget", [20, 4096])
def test_losses_and_gradients_of_two_updates(trunk, kind, budget):
    critic = {"value_coef": 0.7, "value_clip": 0.05}
    learner, values = make_ppo_learner(toy_model(kind), trunk=trunk, tokens_per_micro_batch=budget, critic=critic)
    groups = random_groups(seed=5)
    groups = [replace(g, behaviour=tuple(b - 0.1 for b in g.behaviour)) for g in groups]
    old = learner.begin_step(groups, on_policy=True)
    for lr in (3e-3, 1e-3):  # the first update takes ratios and values to their bounds
        policy = copy.deepcopy(learner._model).double()
        policy.zero_grad()
        own_trunk, head = doubled(values)
        own_trunk = policy if trunk == "shared" else own_trunk
        gradient, metrics = gradient_of(learner, minibatch(groups, lr=lr), old)
        policy_loss, value_loss = double_losses(policy, own_trunk, head, groups, old, learner._config, 0.05)
        (policy_loss + 0.7 * value_loss).backward()
        expected = {name: parameter.grad for name, parameter in policy.named_parameters()}
        expected |= {f"critic.head.{name}": parameter.grad for name, parameter in head.named_parameters()}
        if trunk == "own":
            expected |= {f"critic.trunk.{name}": p.grad for name, p in own_trunk.named_parameters()}
        critics = {name for name in expected if name.startswith("critic.")}
        assert_close({n: t for n, t in gradient.items() if n in critics}, {n: expected[n] for n in critics}, 1e-4)
        policys = expected.keys() - critics
        assert_close({n: t for n, t in gradient.items() if n in policys}, {n: expected[n] for n in policys}, 1e-4)
        assert metrics["loss"] == pytest.approx(policy_loss.item(), abs=1e-5)
        assert metrics["critic/grad_norm"] == pytest.approx(
            float(torch.sqrt(sum(expected[n].square().sum() for n in critics))), rel=1e-4
        )
    assert metrics["critic/clip_ratio"] > 0.02
    assert metrics["clip_ratio/region_mean"] > 0.02


@TRUNKS
def test_micro_batches_and_order_leave_gradients_and_metrics(trunk):
    groups = scored_groups(seed=6)

    def run(groups, budget):
        learner, _ = make_ppo_learner(
            trunk=trunk, tokens_per_micro_batch=budget, critic={"truncation": "bootstrap", "value_clip": 0.01}
        )
        old = learner.begin_step(groups, on_policy=False)
        learner.apply(minibatch(groups), old)
        gradient, metrics = gradient_of(learner, minibatch(groups), old)
        return gradient, {**old.metrics, **metrics}

    expected, expected_metrics = run(groups, 10**6)
    shuffled = [groups[index] for index in np.random.default_rng(6).permutation(len(groups))]
    for case, budget in ((groups, 1), (groups, 33), (shuffled, 64)):
        gradient, metrics = run(case, budget)
        assert_close(gradient, expected, tolerance=1e-4)
        for name in metrics.keys() - {"perf/padding_share"}:
            assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-4, abs=1e-5), name


@TRUNKS
def test_what_a_masked_completion_holds_changes_nothing(trunk):
    """Its score and what engine and reference said of it, even NaN, leave every weight bit for bit."""
    groups = scored_groups(seed=7, reference=True)

    def run(spoil):
        learner, _ = make_ppo_learner(trunk=trunk, mask_truncated=True, kl_coef=0.1, kl_in="reward")
        spoilt = [
            replace(
                group,
                advantages=np.where(group.truncated, np.float32(spoil), group.advantages),
                behaviour=_spoilt(group.behaviour, group.truncated, spoil),
                reference=_spoilt(group.reference, group.truncated, spoil),
            )
            for group in groups
        ]
        old = learner.begin_step(spoilt, on_policy=True)
        learner.apply(minibatch(spoilt, kl_coef=0.1), old)
        return {name: tensor.clone() for name, tensor in learner.state()[0].items()}

    assert_equal(run(np.nan), run(-3.0))


def _spoilt(parts, mask, spoil):
    return tuple(np.full_like(part, spoil) if masked else part for part, masked in zip(parts, mask, strict=True))


@TRUNKS
def test_the_critic_learns_alone_in_its_warm_up(trunk):
    groups = scored_groups(seed=8)
    learner, _ = make_ppo_learner(trunk=trunk, critic={"warmup_steps": 2})
    before = weights(learner)
    for step in range(3):
        head = learner.state()[0]["critic.weight.head.weight"].clone()
        learner.snapshot()
        for _ in range(2):  # a step that is tried again is counted once
            learner.restore()
            learner.apply(minibatch(groups), learner.begin_step(groups, on_policy=True))
        assert not torch.equal(learner.state()[0]["critic.weight.head.weight"], head)
        moved = any(not torch.equal(weights(learner)[name], tensor) for name, tensor in before.items())
        assert moved == (step == 2)
    assert learner.state()[1] == {"updates": 1, "critic.updates": 3, "critic.steps": 3}


def test_looking_at_the_policy_counts_no_step():
    learner, _ = make_ppo_learner(critic={"warmup_steps": 1})
    learner.old_policy(random_groups(seed=9), on_policy=False)
    assert learner.state()[1]["critic.steps"] == 0


def test_the_critics_learning_rate_follows_the_policys_schedule():
    """AdamW's first step is the learning rate times the sign of the gradient."""
    groups = random_groups(seed=10)
    for rate, expected in ((None, 2e-3), (0.05, 0.1)):
        learner, values = make_ppo_learner(lr=1e-3, critic={"lr": rate})
        before = values.head.weight.detach().clone()
        learner.apply(minibatch(groups, lr=2e-3), learner.begin_step(groups, on_policy=True))
        torch.testing.assert_close(
            (values.head.weight - before).abs(), torch.full_like(before, expected), rtol=1e-2, atol=0
        )


@TRUNKS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_restore_and_a_new_learner_go_on_bit_for_bit(trunk, dtype):
    groups = scored_groups(seed=11)
    settings = {"trunk": trunk, "dtype": dtype, "critic": {"warmup_steps": 1, "truncation": "bootstrap"}}

    def run(learner):
        metrics = []
        for _ in range(2):
            old = learner.begin_step(groups, on_policy=False)
            metrics += [dict(old.metrics), learner.apply(minibatch(groups), old), learner.apply(minibatch(groups), old)]
        return metrics, {name: tensor.clone() for name, tensor in learner.state()[0].items()}

    first, _ = make_ppo_learner(toy_model(), **settings)
    run(first)
    first.snapshot()
    tensors, counters = first.state()
    blob = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    metrics, state = run(first)
    first.restore()
    assert_equal(first.state()[0], load(blob))
    assert first.state()[1] == counters
    second, _ = make_ppo_learner(toy_model(seed=99), head_seed=5, **settings)
    second.load_state(load(blob), counters)
    for learner in (first, second):
        again, ended = run(learner)
        assert again == metrics
        assert_equal(ended, state)


def test_a_state_without_critic_is_refused():
    learner, _ = make_ppo_learner()
    tensors, counters = learner.state()
    tensors = {name: tensor for name, tensor in tensors.items() if "head" not in name}
    with pytest.raises(ValueError, match=r"critic|does not fit"):
        learner.load_state(tensors, counters)


def test_a_critic_that_is_not_finite_stops_before_any_weight_moves():
    groups = random_groups(seed=12)
    learner, values = make_ppo_learner()
    old = learner.begin_step(groups, on_policy=True)
    before = first_moments(learner)
    values.head.bias.data.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match=r"loss nan .*no weight was moved"):
        learner.apply(minibatch(groups), old)
    assert_equal(first_moments(learner), before)


def test_a_step_without_groups_is_a_step():
    learner, _ = make_ppo_learner()
    assert learner.begin_step([], on_policy=True).metrics == {}
    assert learner.state()[1]["critic.steps"] == 1


def test_gradient_checkpointing_changes_no_bit():
    groups = random_groups(seed=13)
    ended = []
    for checkpointing in (False, True):
        learner, _ = make_ppo_learner(toy_model(), gradient_checkpointing=checkpointing)
        learner.apply(minibatch(groups), learner.begin_step(groups, on_policy=True))
        ended.append({name: tensor.clone() for name, tensor in learner.state()[0].items()})
    assert_equal(*ended)

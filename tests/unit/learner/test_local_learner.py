import copy
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from learner_cases import (
    VOCABULARY,
    assert_close,
    assert_equal,
    gradient_of,
    make_learner,
    minibatch,
    random_groups,
    sampling,
    toy_model,
    weights,
)
from safetensors.torch import load, save

from gyre_core.policy.logprobs import TokenStatistics


def with_behaviour(groups, statistics, truncated=False):
    """The groups as an engine with the learner's own weights would have scored them."""
    flat = (statistics.truncated if truncated else statistics.log_probabilities).numpy()
    scored, start = [], 0
    for group in groups:
        behaviour = []
        for completion in group.completions:
            behaviour.append(flat[start : start + len(completion)].copy())
            start += len(completion)
        scored.append(replace(group, behaviour=tuple(behaviour)))
    return scored


def run(learner, groups, updates=3, lr=1e-3):
    old = learner.begin_step(groups, on_policy=False)
    return [learner.apply(minibatch(groups, lr=lr), old) for _ in range(updates)]


class TestOldPolicy:
    def test_on_policy_is_the_engines_without_a_forward_pass(self):
        groups = random_groups(seed=1)
        old = make_learner().begin_step(groups, on_policy=True)
        for group in groups:
            part = old.groups[group.group_id]
            np.testing.assert_array_equal(part.log_probabilities, np.concatenate(group.behaviour))
            assert (part.importance == 1.0).all()
            assert part.trained.all()
        assert old.metrics == {}

    @pytest.mark.parametrize("dropout", [0.0, 0.1])
    def test_unchanged_weights_have_ratio_1(self, dropout):
        """Exactly 1 for the same forward pass, within 1e-5 across shapes."""
        model = toy_model("llama", attention_dropout=dropout).train()
        learner = make_learner(model, tokens_per_micro_batch=4096)
        groups = random_groups(seed=2)
        groups = with_behaviour(groups, learner.log_probabilities(groups))
        old = learner.begin_step(groups, on_policy=False)
        assert all((part.importance == 1.0).all() for part in old.groups.values())
        assert learner.apply(minibatch(groups, lr=0.0), old)["policy_kl"] == 0.0
        narrow = make_learner(copy.deepcopy(model), tokens_per_micro_batch=1).begin_step(groups, on_policy=False)
        assert narrow.metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=1e-5)
        assert narrow.metrics["sampling/sampling_logp_difference/max"] <= 1e-5

    @pytest.mark.parametrize("sampled", [{"top_p": 0.8}, {"top_k": 5, "temperature": 0.6}, {"temperature": 1.7}])
    def test_unchanged_weights_have_ratio_1_under_truncation(self, sampled):
        learner = make_learner(sampled=sampling(**sampled))
        groups = random_groups(seed=3)
        groups = with_behaviour(groups, learner.log_probabilities(groups), sampling(**sampled).truncated)
        for part in learner.begin_step(groups, on_policy=False).groups.values():
            np.testing.assert_allclose(part.importance[part.trained], 1.0, atol=1e-5)

    def test_truncated_sampling_needs_the_forward_pass_even_on_policy(self):
        groups = random_groups(seed=3)
        old = make_learner(sampled=sampling(top_k=5)).begin_step(groups, on_policy=True)
        assert 0.0 < old.metrics["sampling/masked_share"] < 1.0

    def test_bfloat16_is_corrected_even_on_policy(self):
        """Generation and the update round differently, so that the engine's log-probabilities are not the learner's."""
        groups = random_groups(seed=3)
        learner = make_learner(dtype=torch.bfloat16)
        old = learner.begin_step(groups, on_policy=True)
        measured = learner.begin_step(groups, on_policy=False)
        for name, part in measured.groups.items():
            np.testing.assert_array_equal(old.groups[name].importance, part.importance)
        assert old.metrics == measured.metrics != {}

    def test_masked_importance_leaves_out_what_truncated_importance_holds(self):
        """Weights 0.4, 0.6, 1.9 and 2.1 in turn, with bounds of 0.5 and 2."""
        learner = make_learner()
        groups = random_groups(seed=4)
        exact = learner.log_probabilities(groups).log_probabilities
        wanted = torch.tensor([0.4, 0.6, 1.9, 2.1]).repeat(len(exact) // 4 + 1)[: len(exact)]
        groups = with_behaviour(groups, TokenStatistics(exact - wanted.log(), torch.empty(0), None))
        for mode, kept, capped in (("truncate", wanted > 0, 2.0), ("mask", (wanted > 0.5) & (wanted < 2.0), 1.9)):
            old = make_learner(importance_mode=mode).begin_step(groups, on_policy=False)
            trained = np.concatenate([old.groups[g.group_id].trained for g in groups])
            importance = np.concatenate([old.groups[g.group_id].importance for g in groups])
            np.testing.assert_array_equal(trained, kept.numpy())
            np.testing.assert_allclose(importance[trained], wanted[kept].clamp(max=capped), rtol=1e-4)
            assert old.metrics["sampling/masked_share"] == pytest.approx(1 - float(kept.float().mean()))

    def test_a_distant_engine_is_capped_and_reported(self):
        groups = random_groups(seed=4)
        groups = [replace(g, behaviour=tuple(part - 3.0 for part in g.behaviour)) for g in groups]
        old = make_learner(importance_cap=1.5).begin_step(groups, on_policy=False)
        assert max(part.importance.max() for part in old.groups.values()) == pytest.approx(1.5)
        assert old.metrics["sampling/importance_sampling_ratio/max"] > 1.5

    def test_bfloat16_drift_is_measured(self):
        exact = make_learner(toy_model())
        groups = random_groups(seed=5)
        groups = with_behaviour(groups, exact.log_probabilities(groups))
        rounded = make_learner(toy_model(), dtype=torch.bfloat16).begin_step(groups, on_policy=False)
        assert 1e-4 < rounded.metrics["sampling/sampling_logp_difference/mean"] < 0.2

    def test_the_first_update_tells_the_difference_where_no_forward_pass_did(self):
        """An engine that is off by 0.03 nats on every other token is seen, at the step's first update alone."""
        learner = make_learner()
        groups = random_groups(seed=5)
        exact = learner.log_probabilities(groups).log_probabilities.numpy()
        shift = np.where(np.arange(len(exact)) % 2, 0.03, 0.0).astype(np.float32)
        shifted = TokenStatistics(torch.from_numpy(exact + shift), torch.empty(0), None)
        groups = with_behaviour(groups, shifted)
        old = learner.begin_step(groups, on_policy=True)
        first = learner.apply(minibatch(groups, lr=1e-2), old)
        assert first["sampling/sampling_logp_difference/mean"] == pytest.approx(shift.mean(), abs=1e-5)
        assert "sampling/sampling_logp_difference/mean" not in learner.apply(minibatch(groups), old)
        measured = learner.begin_step(groups, on_policy=False)
        assert "sampling/sampling_logp_difference/mean" not in learner.apply(minibatch(groups), measured)


class TestMaskedContent:
    def test_tokens_outside_the_support_change_nothing_but_context(self):
        """What the engine and the reference said of them, even NaN, leaves the gradient bit for bit."""
        groups = random_groups(seed=6, reference=True)

        def gradient(spoil):
            learner = make_learner(sampled=sampling(top_k=8))
            old = learner.begin_step(groups, on_policy=False)
            changed = []
            for group in groups:
                outside = np.split(
                    ~old.groups[group.group_id].trained, np.cumsum([len(c) for c in group.completions])[:-1]
                )
                spoilt = tuple(
                    np.where(mask, np.float32(spoil), part) for mask, part in zip(outside, group.reference, strict=True)
                )
                changed.append(replace(group, reference=spoilt))
            return gradient_of(learner, minibatch(changed, kl_coef=0.1), old)[0]

        assert_equal(gradient(np.nan), gradient(-1.0))

    @pytest.mark.parametrize("on_policy", [True, False])
    @pytest.mark.parametrize("aggregation", ["token", "sequence"])
    def test_completions_that_were_cut_off_can_be_left_out(self, aggregation, on_policy):
        """The gradient is that of the groups without them, whatever was said of them."""
        groups = random_groups(seed=16)
        cut = [replace(g, truncated=np.array([False, True, False, True])) for g in groups]
        spoilt = [
            replace(
                g,
                advantages=np.where(g.truncated, np.float32(np.nan), g.advantages),
                behaviour=tuple(b * np.nan if t else b for b, t in zip(g.behaviour, g.truncated, strict=True)),
            )
            for g in cut
        ]
        short = [
            replace(
                g,
                completions=g.completions[::2],
                behaviour=g.behaviour[::2],
                advantages=g.advantages[::2],
                truncated=g.truncated[::2],
            )
            for g in cut
        ]

        def gradient(groups, **settings):
            learner = make_learner(loss_aggregation=aggregation, **settings)
            return gradient_of(learner, minibatch(groups), learner.begin_step(groups, on_policy=on_policy))

        actual, metrics = gradient(spoilt, mask_truncated=True)
        expected, expected_metrics = gradient(short)
        assert_close(actual, expected, tolerance=1e-5)
        assert metrics["loss"] == pytest.approx(expected_metrics["loss"], rel=1e-5)

    def test_only_completions_that_were_cut_off_is_nothing_to_train_on(self):
        groups = [replace(g, truncated=np.ones(4, dtype=bool)) for g in random_groups(seed=17)]
        learner = make_learner(mask_truncated=True)
        metrics = learner.apply(minibatch(groups), learner.begin_step(groups, on_policy=True))
        assert metrics == {"optim/updates": 0.0, "optim/skipped_updates": 1.0}

    def test_a_minibatch_without_a_trained_token_is_skipped_and_counted(self):
        learner = make_learner(sampled=sampling(top_k=1))
        groups = random_groups(seed=7, size=2)
        old = learner.begin_step(groups, on_policy=False)
        old = replace(
            old,
            groups={name: replace(p, trained=np.zeros_like(p.trained)) for name, p in old.groups.items()},
        )
        before = weights(learner)
        assert learner.apply(minibatch(groups), old) == {"optim/updates": 0.0, "optim/skipped_updates": 1.0}
        assert learner.apply(minibatch([]), old)["optim/skipped_updates"] == 1.0
        assert learner.applied == 2
        assert_equal(weights(learner), before)
        assert learner.state()[1] == {"updates": 0}

    def test_one_long_reply_costs_little_padding_and_the_same_loss(self):
        rng = np.random.default_rng(0)
        lengths = [100] * 7 + [4000] + [100] * 8
        completions = tuple(rng.integers(0, VOCABULARY, size=length).astype(np.int32) for length in lengths)
        group = replace(
            random_groups(seed=0, count=1, size=16)[0],
            completions=completions,
            behaviour=tuple(np.full(length, -3.0, dtype=np.float32) for length in lengths),
        )
        results = []
        for budget in (2048, 1_000_000):
            learner = make_learner(tokens_per_micro_batch=budget, sampled=sampling(max_tokens=4000))
            results.append(learner.apply(minibatch([group]), learner.begin_step([group], on_policy=True)))
            assert results[-1]["perf/padding_share"] < 0.2
        assert results[0]["loss"] == pytest.approx(results[1]["loss"], abs=1e-6)


class TestPrecision:
    def test_float32_masters_keep_what_bfloat16_weights_would_lose(self):
        groups = random_groups(seed=8)
        model = toy_model()
        pure = {name: p.detach().to(torch.bfloat16) for name, p in model.named_parameters()}
        learner = make_learner(model, dtype=torch.bfloat16, betas=(0.9, 0.99))
        assert_equal(weights(learner), pure)
        masters = {n: t.clone() for n, t in learner.state()[0].items() if n.startswith("weight.")}
        old = learner.begin_step(groups, on_policy=True)
        for _ in range(150):
            learner.apply(minibatch(groups, lr=1e-6), old)
        # AdamW moves a weight by at most about lr an update: too little for a bfloat16 weight of this size, ever.
        large = {name: tensor.abs() > 0.02 for name, tensor in pure.items()}
        for name, tensor in pure.items():
            assert torch.equal((tensor - 1e-6)[large[name]], tensor[large[name]])
        changed = sum(int((weights(learner)[name] != pure[name])[large[name]].sum()) for name in pure)
        total = sum(int(part.sum()) for part in large.values())
        assert changed > 0.05 * total
        for name, tensor in learner.state()[0].items():
            if name.startswith("weight."):
                assert tensor.dtype == torch.float32
                assert not torch.equal(tensor, masters[name])
                assert torch.equal(tensor.bfloat16(), learner.policy_weights()[name.removeprefix("weight.")])

    @pytest.mark.parametrize("kind", ["qwen3", "llama"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_gradient_checkpointing_changes_no_bit(self, kind, dtype):
        groups = random_groups(seed=9)
        results = []
        for checkpointing in (False, True):
            learner = make_learner(toy_model(kind), dtype=dtype, gradient_checkpointing=checkpointing)
            run(learner, groups)
            results.append(weights(learner))
        assert_equal(*results)


class TestState:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_restore_goes_back_bit_for_bit_each_time(self, dtype):
        groups = random_groups(seed=10)
        learner = make_learner(dtype=dtype)
        old = learner.begin_step(groups, on_policy=False)
        learner.apply(minibatch(groups), old)
        for _ in range(2):  # the second snapshot goes over the first
            learner.snapshot()
            before, applied = weights(learner), learner.applied
            outcomes = []
            for _ in range(2):
                learner.apply(minibatch(groups), old)
                learner.apply(minibatch(groups), old)
                outcomes.append((weights(learner), {n: t.clone() for n, t in learner.state()[0].items()}))
                learner.restore()
                assert learner.applied == applied
                assert_equal(weights(learner), before)
            assert_equal(outcomes[0][0], outcomes[1][0])
            assert_equal(outcomes[0][1], outcomes[1][1])
            learner.apply(minibatch(groups), old)

    @pytest.mark.parametrize("kind", ["qwen3", "llama"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_new_learner_goes_on_from_the_state_bit_for_bit(self, kind, dtype):
        groups = random_groups(seed=11)
        first = make_learner(toy_model(kind), dtype=dtype)
        run(first, groups)
        tensors, counters = first.state()
        blob = save({name: tensor.contiguous() for name, tensor in tensors.items()})
        second = make_learner(toy_model(kind, seed=99), dtype=dtype)
        second.load_state(load(blob), counters)
        assert counters == {"updates": 3}
        assert_equal(weights(second), weights(first))
        assert run(first, groups) == run(second, groups)
        assert_equal(second.state()[0], first.state()[0])

    def test_a_state_of_another_model_is_refused(self):
        tensors, counters = make_learner(toy_model("qwen3")).state()
        with pytest.raises(ValueError, match=r"does not fit this model: first_moment.lm_head.*models\.policy"):
            make_learner(toy_model("llama")).load_state(tensors, counters)

    @pytest.mark.parametrize("kind", ["qwen3", "llama"])
    def test_policy_weights_load_into_a_fresh_model(self, kind):
        learner = make_learner(toy_model(kind), dtype=torch.bfloat16)
        run(learner, random_groups(seed=12))
        published = learner.policy_weights()
        assert all(tensor.dtype == torch.bfloat16 for tensor in published.values())
        assert len({tensor.data_ptr() for tensor in published.values()}) == len(published)
        fresh = toy_model(kind, seed=5).to(torch.bfloat16)
        result = fresh.load_state_dict(published, strict=False)
        assert result.unexpected_keys == []
        assert result.missing_keys == (["lm_head.weight"] if kind == "qwen3" else [])


class TestFailures:
    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_a_non_finite_loss_stops_before_any_weight_moves(self, value):
        groups = random_groups(seed=13)
        broken = replace(groups[1], advantages=np.full(4, value, dtype=np.float32))
        learner, untouched = make_learner(), make_learner()
        old = learner.begin_step(groups, on_policy=True)
        with pytest.raises(FloatingPointError, match=r"group-0, group-1, .*no weight was moved"):
            learner.apply(minibatch([groups[0], broken, *groups[2:]]), old)
        assert learner.applied == 0
        run(learner, groups)
        run(untouched, groups)
        assert_equal(learner.state()[0], untouched.state()[0])

    def test_a_penalty_without_reference_is_refused(self):
        groups = random_groups(seed=14)
        learner = make_learner()
        with pytest.raises(ValueError, match=r"group-0 carries no reference .* learning\.kl_coef"):
            learner.apply(minibatch(groups, kl_coef=0.1), learner.begin_step(groups, on_policy=True))

    def test_greedy_rollouts_are_refused(self):
        with pytest.raises(ValueError, match=re.escape("rollout.temperature")):
            make_learner(sampled=sampling(temperature=0.0))


def test_reported_kl_is_that_of_the_reference_even_without_a_penalty():
    groups = random_groups(seed=15, reference=True)
    learner = make_learner()
    scored = learner.log_probabilities(groups).log_probabilities
    reference = torch.from_numpy(np.concatenate([part for group in groups for part in group.reference]))
    difference = (scored - reference).double()
    metrics = learner.apply(minibatch(groups), learner.begin_step(groups, on_policy=True))
    assert metrics["kl"] == pytest.approx(float((torch.exp(-difference) - 1 + difference).mean()), rel=1e-5)


def test_a_penalty_in_the_reward_is_measured_and_not_in_the_loss():
    groups = random_groups(seed=18, reference=True)
    gradients = {}
    for place, kl_coef in (("reward", 0.3), ("loss", 0.0), ("loss", 0.3)):
        learner = make_learner(kl_in=place, kl_coef=kl_coef)
        old = learner.begin_step(groups, on_policy=True)
        gradients[place, kl_coef], metrics = gradient_of(learner, minibatch(groups, kl_coef=kl_coef), old)
        assert metrics["kl"] > 0.0
    assert_equal(gradients["reward", 0.3], gradients["loss", 0.0])
    embedding = "model.embed_tokens.weight"
    assert not torch.equal(gradients["loss", 0.3][embedding], gradients["loss", 0.0][embedding])

"""The critic of PPO: values at the start of a step, the advantages made of them, and its own updates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from gyre_core.algorithms.divergence import kl_penalty
from gyre_core.algorithms.gae import generalised_advantages, token_rewards
from gyre_core.algorithms.values import ValueInputs, explained_variance, value_loss
from gyre_core.algorithms.whitening import whiten
from gyre_core.config.sections import CriticConfig, LearningConfig
from gyre_core.learner.inputs import GroupValues, MinibatchInputs, OldPolicy, references, split_by_group
from gyre_core.learner.masters import MasterWeights
from gyre_core.policy.logprobs import checkpoint_layers, predicting_states
from gyre_core.policy.packing import plan_micro_batches
from gyre_core.policy.value_model import ValueModel, score_values
from gyre_core.types import TrainingGroup

T = TypeVar("T")

_PREFIX = "critic."
"""Sets the critic's names in a learner's state apart from the policy's."""


class Critic:
    """A value model in training, with masters, moments and a learning rate of its own.

    A step calls `begin_step` once; each minibatch then leaves gradients, by `loss` on the policy's hidden states where
    they are shared, else by `accumulate`, and moves the weights by `step`.
    """

    def __init__(self, model: ValueModel, config: CriticConfig, learning: LearningConfig, dtype: torch.dtype) -> None:
        """Take over `model`, which then computes in `dtype`."""
        self._model = model
        self._config = config
        self._learning = learning
        if learning.gradient_checkpointing and not model.shared:
            checkpoint_layers(model.trunk)
        self.masters = MasterWeights(model.parameters(), learning, dtype, of="models.critic")
        self._lr_factor = 1.0 if config.lr is None else config.lr / learning.lr
        self._steps = 0
        self._snapshot_steps = 0

    @property
    def shared(self) -> bool:
        """Whether the values are made from the policy's hidden states."""
        return self._model.shared

    @property
    def warming_up(self) -> bool:
        """Whether the critic learns alone in the present step."""
        return self._steps <= self._config.warmup_steps

    def begin_step(self, groups: Sequence[TrainingGroup], old: OldPolicy) -> OldPolicy:
        """`old` with values, returns and advantages of the step's distinct groups; counts the step.

        A completion's `advantages` in its group are its score here. Raises ValueError when a KL penalty in the reward
        lacks its reference.
        """
        self._steps += 1
        if not groups:
            return old
        values, last_values = self._values(groups)
        advantages = self._advantages(groups, self._penalties(groups, old), values, last_values)
        returns = advantages + values
        trained = np.concatenate([old.groups[group.group_id].trained for group in groups])
        metrics = _value_metrics(values[trained], returns[trained])
        if self._config.whiten_advantages:
            advantages = whiten(advantages, trained)
        columns = (split_by_group(part.astype(np.float32), groups) for part in (values, returns, advantages))
        by_group = {group.group_id: GroupValues(*own) for group, *own in zip(groups, *columns, strict=True)}
        return replace(old, values=by_group, metrics={**old.metrics, **metrics})

    def loss(self, states: torch.Tensor, inputs: ValueInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The micro-batch's share of the weighted value loss, and sums over its tokens for the metrics.

        `states` is `[tokens, hidden]`, the hidden states that predict the tokens of `inputs`.
        """
        loss, sums = value_loss(self._model.values(states), inputs, self._config.value_clip)
        return self._config.value_coef * loss, sums

    def accumulate(self, inputs: MinibatchInputs) -> dict[str, float]:
        """Leave the gradient of a minibatch with the masters of a trunk of its own; sums over its tokens."""
        assert not self.shared and inputs.values is not None
        trunk, budget = self._model.trunk, self._learning.tokens_per_micro_batch
        hidden_size = trunk.config.get_text_config().hidden_size
        sums: defaultdict[str, float] = defaultdict(float)
        for micro_batch in plan_micro_batches(inputs.sequences, budget, hidden_size, inputs.trained):
            places = torch.from_numpy(micro_batch.places).to(trunk.device)
            loss, token_sums = self.loss(predicting_states(trunk, micro_batch), inputs.values.at(places))
            torch.autograd.backward(loss)
            self.masters.collect_gradients()
            for name, value in token_sums.items():
                sums[name] += float(value)
        return sums

    def step(self, lr: float, norm: torch.Tensor) -> None:
        """Move the weights by the gradient of norm `norm`; `lr` is the policy's learning rate."""
        self.masters.step(lr * self._lr_factor, norm, self._learning.max_grad_norm)

    def snapshot(self) -> None:
        """Keep the present state in host memory, over the previous snapshot."""
        self.masters.snapshot()
        self._snapshot_steps = self._steps

    def restore(self) -> None:
        """Go back to the snapshot, bit for bit."""
        self.masters.restore()
        self._steps = self._snapshot_steps

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """The live tensors and the counters, all names under `critic.`."""
        tensors, counters = self.masters.state()
        counters["steps"] = self._steps
        return _prefixed(tensors), _prefixed(counters)

    def load_state(self, tensors: Mapping[str, torch.Tensor], counters: Mapping[str, int]) -> None:
        """Take over what `state` returned, among other names; raises ValueError when it is of another model."""
        self.masters.load_state(_own(tensors), _own(counters))
        self._steps = _own(counters)["steps"]

    def _values(self, groups: Sequence[TrainingGroup]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Values of the states before each token, `[tokens]`, and after each completion, `[completions]`.

        The latter are 0 but for completions that were cut off, when those are bootstrapped. Such a one is scored with
        a token appended, whose id does not matter: what predicts it is the state wanted.
        """
        completions = [completion for group in groups for completion in group.completions]
        cut_off = np.concatenate([group.truncated for group in groups])
        if self._config.truncation == "terminal":
            cut_off = np.zeros_like(cut_off)
        extended = iter(
            [np.append(ids, ids[-1]) if cut else ids for ids, cut in zip(completions, cut_off, strict=True)]
        )
        sequences = [(group.prompt_ids, [next(extended) for _ in group.completions]) for group in groups]
        budget = self._learning.tokens_per_micro_batch
        scored = score_values(self._model, sequences, budget).numpy().astype(np.float64)
        appended = np.cumsum([len(ids) + cut for ids, cut in zip(completions, cut_off, strict=True)])[cut_off] - 1
        last_values = np.zeros(len(completions))
        last_values[cut_off] = scored[appended]
        return np.delete(scored, appended), last_values

    def _advantages(
        self,
        groups: Sequence[TrainingGroup],
        penalties: NDArray[np.float64],
        values: NDArray[np.float64],
        last_values: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Advantages before whitening, `[tokens]`, like `penalties` and `values`; `last_values` is `[completions]`."""
        ends = np.cumsum([len(completion) for group in groups for completion in group.completions])[:-1]
        scores = np.concatenate([group.advantages for group in groups]).tolist()
        parts = zip(scores, np.split(penalties, ends), np.split(values, ends), last_values.tolist(), strict=True)
        gamma, decay = self._config.gamma, self._config.gae_lambda
        return np.concatenate(
            [
                generalised_advantages(token_rewards(score, own_penalties), own_values, last_value, gamma, decay)
                for score, own_penalties, own_values, last_value in parts
            ]
        )

    def _penalties(self, groups: Sequence[TrainingGroup], old: OldPolicy) -> NDArray[np.float64]:
        """What a KL penalty in the reward takes off each token's reward, `[tokens]`: coefficient x k1."""
        kl_coef = self._learning.kl_coef if self._learning.kl_in == "reward" else 0.0
        log_probabilities = np.concatenate([old.groups[group.group_id].log_probabilities for group in groups])
        if kl_coef == 0.0:
            return np.zeros(len(log_probabilities))
        reference = references(groups, kl_coef)
        assert reference is not None
        policy, other = (torch.from_numpy(part).double() for part in (log_probabilities, np.concatenate(reference)))
        return kl_coef * kl_penalty(policy, other, "k1").numpy()


def without_critic(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a learner's state that are not its critic's."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(_PREFIX)}


def _prefixed(values: Mapping[str, T]) -> dict[str, T]:
    return {_PREFIX + name: value for name, value in values.items()}


def _own(values: Mapping[str, T]) -> dict[str, T]:
    return {name.removeprefix(_PREFIX): value for name, value in values.items() if name.startswith(_PREFIX)}


def _value_metrics(values: NDArray[np.float64], returns: NDArray[np.float64]) -> dict[str, float]:
    """The critic before the step's updates, on the trained tokens, `[tokens]`."""
    if not len(values):
        return {}
    metrics = {"critic/value_mean": float(values.mean()), "critic/return_mean": float(returns.mean())}
    explained = explained_variance(values, returns)
    return metrics if explained is None else metrics | {"critic/explained_variance": explained}

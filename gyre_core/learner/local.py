"""The learner of one process: scores groups, and turns minibatches into optimiser updates."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gyre_core.algorithms.policy_loss import policy_loss
from gyre_core.config.sections import LearningConfig
from gyre_core.learner.critic import Critic, without_critic
from gyre_core.learner.inputs import (
    MinibatchInputs,
    OldPolicy,
    corrected_old_policy,
    engine_as_old_policy,
    minibatch_inputs,
    prompt_completions,
)
from gyre_core.learner.masters import MasterWeights
from gyre_core.policy.logprobs import (
    CausalLM,
    TokenStatistics,
    check_packed_forward,
    checkpoint_layers,
    predicting_states,
    score_groups,
    token_statistics,
)
from gyre_core.policy.lora import merged_weights, trainable_parameters
from gyre_core.policy.packing import MicroBatch, plan_micro_batches
from gyre_core.types import Minibatch, SamplingParameters, TrainingGroup

_LOGP_DIFFERENCE = "sampling/sampling_logp_difference/mean"


@dataclass(frozen=True, slots=True)
class StepUpdate:
    """What the learner did in a step: the old policy it compared with, and the metrics of each update."""

    old: OldPolicy
    updates: Sequence[Mapping[str, float]]


class LocalLearner:
    """Trains a model in place, one minibatch at a time.

    A step is `take_step`: `begin_step` once, then `apply` for each minibatch. Every result repeats bit for bit on a CPU
    with the same inputs and the same number of threads; dropout is off throughout.
    """

    def __init__(
        self,
        model: CausalLM,
        config: LearningConfig,
        *,
        sampling: SamplingParameters,
        dtype: torch.dtype,
        critic: Critic | None = None,
    ) -> None:
        """Take over `model`; `sampling` is how the rollouts are sampled, `dtype` what the model computes in.

        With a critic the groups' `advantages` are scores, of which it makes advantages of tokens. Raises ValueError
        for a temperature of 0 and for a model that cannot score packed rows.
        """
        if sampling.temperature <= 0.0:
            raise ValueError("greedy rollouts carry no signal to learn from; set rollout.temperature above 0")
        self._model = model.eval()
        self._config = config
        self._sampling = sampling
        check_packed_forward(self._model)
        if config.gradient_checkpointing:
            checkpoint_layers(self._model)
        parameters = trainable_parameters(self._model)
        for frozen in set(self._model.parameters()).difference(parameters.values()):
            frozen.data = frozen.data.to(dtype)
        self._masters = MasterWeights(parameters, config, dtype, of="models.policy")
        self._critic = critic
        self._exact = dtype == torch.float32
        self.applied = 0
        """Minibatches applied, or skipped as empty, since `begin_step`."""
        self._snapshot_applied = 0

    def log_probabilities(self, groups: Sequence[TrainingGroup]) -> TokenStatistics:
        """Score every completion token under the present weights.

        Flat: `[tokens]` of all groups and completions, one after the other. The truncated log-probabilities are
        there when sampling is truncated.
        """
        return score_groups(
            self._model,
            prompt_completions(groups),
            self._sampling,
            self._config.tokens_per_micro_batch,
            truncated=self._sampling.truncated,
        )

    def take_step(self, minibatches: Sequence[Minibatch], on_policy: bool) -> StepUpdate:
        """All updates of a step, `on_policy` as in `begin_step`; equal states and minibatches lead to equal states."""
        groups = [group for minibatch in minibatches for group in minibatch.groups]
        old = self.begin_step(groups, on_policy)
        return StepUpdate(old, [self.apply(minibatch, old) for minibatch in minibatches])

    def begin_step(self, groups: Sequence[TrainingGroup], on_policy: bool) -> OldPolicy:
        """Fix the old policy and values of a step on `groups`, all that its minibatches draw from; `applied` becomes 0.

        `on_policy` says that the engine sampled all of them with the learner's present weights. Raises ValueError
        when a KL penalty in the reward lacks the reference's log-probabilities.
        """
        self.applied = 0
        distinct = list({group.group_id: group for group in groups}.values())
        old = self.old_policy(distinct, on_policy)
        return old if self._critic is None else self._critic.begin_step(distinct, old)

    def old_policy(self, groups: Sequence[TrainingGroup], on_policy: bool) -> OldPolicy:
        """The present policy on distinct groups, compared with the engine's; changes nothing.

        `on_policy` is as in `begin_step`. Where it holds, the engine's log-probabilities are the learner's own and no
        forward pass is needed, unless sampling is truncated or the model computes in a type that rounds otherwise in
        generation than here.
        """
        if not groups or (on_policy and self._exact and not self._sampling.truncated):
            return engine_as_old_policy(groups, self._config)
        scored = self.log_probabilities(groups)
        return corrected_old_policy(groups, scored.log_probabilities, scored.truncated, self._config)

    def apply(self, minibatch: Minibatch, old: OldPolicy) -> dict[str, float]:
        """One optimiser update from the gradient of the whole minibatch; returns its metrics.

        Those of a step's first update tell how far the learner's log-probabilities are from the engine's, unless
        `begin_step` measured it. While the critic warms up, the policy is measured and does not move.

        A minibatch without a token to train on moves nothing and returns `optim/skipped_updates` 1 with the update
        counters alone. Raises FloatingPointError, before any weight moves, when a loss or gradient is not finite, and
        ValueError when a KL penalty lacks the reference's log-probabilities.
        """
        if not any(old.groups[group.group_id].trained.any() for group in minibatch.groups):
            self.applied += 1
            return {"optim/updates": 0.0, "optim/skipped_updates": 1.0}
        inputs = minibatch_inputs(minibatch, old, self._config, self._sampling.max_tokens, self._model.device)
        metrics = self._accumulate_gradients(inputs, minibatch.kl_coef if self._config.kl_in == "loss" else 0.0)
        # Before the step's first update the learner holds the weights that the engine sampled with, so the difference
        # costs nothing here; `begin_step` measured it where it scored the groups anyway.
        if self.applied > 0 or _LOGP_DIFFERENCE in old.metrics:
            del metrics[_LOGP_DIFFERENCE]
        norm = self._masters.gradient_norm()
        metrics["optim/grad_norm"] = float(norm)
        self._check_finite(self._masters, metrics["loss"], norm, minibatch)
        if self._critic is not None:
            value_norm = self._critic.masters.gradient_norm()
            metrics["critic/grad_norm"] = float(value_norm)
            self._check_finite(self._critic.masters, metrics["critic/value_loss"], value_norm, minibatch)
            self._critic.step(minibatch.lr, value_norm)
        if self._critic is None or not self._critic.warming_up:
            self._masters.step(minibatch.lr, norm, self._config.max_grad_norm)
        self.applied += 1
        return metrics | {"optim/updates": 1.0, "optim/skipped_updates": 0.0}

    def snapshot(self) -> None:
        """Keep the present state in host memory, over the previous snapshot."""
        self._masters.snapshot()
        if self._critic is not None:
            self._critic.snapshot()
        self._snapshot_applied = self.applied

    def restore(self) -> None:
        """Go back to the snapshot, bit for bit, `applied` included."""
        self._masters.restore()
        if self._critic is not None:
            self._critic.restore()
        self.applied = self._snapshot_applied

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """What an exact resume needs: tensors for safetensors (live, not copies), counters for JSON."""
        tensors, counters = self._masters.state()
        if self._critic is not None:
            own_tensors, own_counters = self._critic.state()
            tensors, counters = tensors | own_tensors, counters | own_counters
        return tensors, counters

    def load_state(self, tensors: Mapping[str, torch.Tensor], counters: Mapping[str, int]) -> None:
        """Take over what `state` returned; raises ValueError when it is of another model."""
        if self._critic is not None:
            self._critic.load_state(tensors, counters)
            tensors = without_critic(tensors)
        self._masters.load_state(tensors, counters)

    def policy_weights(self) -> dict[str, torch.Tensor]:
        """The whole policy's weights under its base model's names, in the type that it computes in, tied ones once.

        Adapters are merged. Tensors without one are live, not copies.
        """
        return merged_weights(self._model)

    def _accumulate_gradients(self, inputs: MinibatchInputs, kl_coef: float) -> dict[str, float]:
        """Leave the minibatch's gradients with the masters; returns the means over its trained tokens."""
        hidden_size = self._model.config.get_text_config().hidden_size
        budget = self._config.tokens_per_micro_batch
        self._masters.zero_gradients()
        if self._critic is not None:
            self._critic.masters.zero_gradients()
        sums: defaultdict[str, float] = defaultdict(float)
        slots = padding = 0
        for micro_batch in plan_micro_batches(inputs.sequences, budget, hidden_size, inputs.trained):
            token_sums = self._backward(micro_batch, inputs, kl_coef)
            for name, value in zip(token_sums, torch.stack(list(token_sums.values())).tolist(), strict=True):
                sums[name] += value
            slots += micro_batch.segments.size
            padding += micro_batch.padded_tokens
        if self._critic is not None and not self._critic.shared:
            sums |= self._critic.accumulate(inputs)
        trained = int(inputs.trained.sum())
        means = {name: value if name == "loss" else value / trained for name, value in sums.items()}
        return means | {"perf/padding_share": padding / slots}

    def _backward(self, micro_batch: MicroBatch, inputs: MinibatchInputs, kl_coef: float) -> dict[str, torch.Tensor]:
        """Add a micro-batch's gradient to the masters'; returns sums over its tokens."""
        states = predicting_states(self._model, micro_batch)
        places = torch.from_numpy(micro_batch.places).to(states.device)
        scored = token_statistics(
            self._model,
            states,
            micro_batch.targets,
            self._sampling,
            entropy_gradient=self._config.entropy_coef > 0.0,
        )
        tokens = inputs.tokens.at(places)
        loss, sums = policy_loss(scored.log_probabilities, scored.entropy, tokens, self._config, kl_coef)
        sums |= {"loss": loss, _LOGP_DIFFERENCE: (scored.log_probabilities - tokens.old).abs().sum()}
        if self._critic is not None and self._critic.shared:
            assert inputs.values is not None
            value_loss, value_sums = self._critic.loss(states, inputs.values.at(places))
            loss, sums = loss + value_loss, sums | value_sums
        torch.autograd.backward(loss)
        self._masters.collect_gradients()
        if self._critic is not None and self._critic.shared:
            self._critic.masters.collect_gradients()
        return {name: value.detach() for name, value in sums.items()}

    def _check_finite(self, masters: MasterWeights, loss: float, norm: torch.Tensor, minibatch: Minibatch) -> None:
        if not (math.isfinite(loss) and norm.isfinite()):
            parameters = masters.non_finite_gradients()
            raise FloatingPointError(
                f"minibatch {self.applied} of the step has loss {loss:g} and gradient norm {float(norm):g}, not finite "
                f"in {len(parameters)} parameters ({', '.join(parameters[:3])}); its groups are "
                f"{', '.join(group.group_id for group in minibatch.groups)}; no weight was moved; lower learning.lr, "
                "or look for broken weights or log-probabilities"
            )

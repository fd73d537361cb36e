"""The learner of one process: scores groups, and turns minibatches into optimiser updates."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from gyre_core.algorithms.grpo import grpo_loss
from gyre_core.config.sections import LearningConfig
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
    packed_statistics,
    score_groups,
)
from gyre_core.policy.packing import plan_micro_batches
from gyre_core.types import Minibatch, SamplingParameters, TrainingGroup

_LOGP_DIFFERENCE = "sampling/sampling_logp_difference/mean"


class LocalLearner:
    """Trains a model in place, one minibatch at a time.

    A step calls `begin_step` once, then `apply` for each minibatch. Every result repeats bit for bit on a CPU with
    the same inputs and the same number of threads; dropout is off throughout.
    """

    def __init__(
        self, model: CausalLM, config: LearningConfig, *, sampling: SamplingParameters, dtype: torch.dtype
    ) -> None:
        """Take over `model`; `sampling` is how the rollouts are sampled, `dtype` what the model computes in.

        Raises ValueError for a temperature of 0 and for a model that cannot score packed rows.
        """
        if sampling.temperature <= 0.0:
            raise ValueError("greedy rollouts carry no signal to learn from; set rollout.temperature above 0")
        self._model = model.eval()
        self._config = config
        self._sampling = sampling
        check_packed_forward(self._model)
        if config.gradient_checkpointing:
            checkpoint_layers(self._model)
        self._masters = MasterWeights(self._model, config, dtype)
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

    def begin_step(self, groups: Sequence[TrainingGroup], on_policy: bool) -> OldPolicy:
        """Fix the old policy of a step on `groups`, all that its minibatches draw from; `applied` becomes 0.

        `on_policy` says that the engine sampled all of them with the learner's present weights. Then, unless
        sampling is truncated, its log-probabilities are the learner's own and no forward pass is needed.
        """
        self.applied = 0
        distinct = list({group.group_id: group for group in groups}.values())
        if not distinct or (on_policy and not self._sampling.truncated):
            return engine_as_old_policy(distinct)
        scored = self.log_probabilities(distinct)
        return corrected_old_policy(distinct, scored.log_probabilities, scored.truncated, self._config.importance_cap)

    def apply(self, minibatch: Minibatch, old: OldPolicy) -> dict[str, float]:
        """One optimiser update from the gradient of the whole minibatch; returns its metrics.

        Those of a step's first update tell how far the learner's log-probabilities are from the engine's, unless
        `begin_step` measured it.

        A minibatch without a token to train on moves nothing and returns `optim/skipped_updates` 1 with the update
        counters alone. Raises FloatingPointError, before any weight moves, when the loss or the gradient is not
        finite, and ValueError when a KL penalty lacks the reference's log-probabilities.
        """
        if not any(old.groups[group.group_id].supported.any() for group in minibatch.groups):
            self.applied += 1
            return {"optim/updates": 0.0, "optim/skipped_updates": 1.0}
        inputs = minibatch_inputs(minibatch, old, self._config, self._sampling.max_tokens, self._model.device)
        metrics = self._accumulate_gradients(inputs, minibatch.kl_coef)
        # Before the step's first update the learner holds the weights that the engine sampled with, so the difference
        # costs nothing here; `begin_step` measured it where it scored the groups anyway.
        if self.applied > 0 or old.metrics:
            del metrics[_LOGP_DIFFERENCE]
        norm = self._masters.gradient_norm()
        metrics["optim/grad_norm"] = float(norm)
        self._check_finite(metrics, minibatch)
        self._masters.step(minibatch.lr, norm, self._config.max_grad_norm)
        self.applied += 1
        return metrics | {"optim/updates": 1.0, "optim/skipped_updates": 0.0}

    def snapshot(self) -> None:
        """Keep the present state in host memory, over the previous snapshot."""
        self._masters.snapshot()
        self._snapshot_applied = self.applied

    def restore(self) -> None:
        """Go back to the snapshot, bit for bit, `applied` included."""
        self._masters.restore()
        self.applied = self._snapshot_applied

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """What an exact resume needs: tensors for safetensors (live, not copies), counters for JSON."""
        return self._masters.state()

    def load_state(self, tensors: Mapping[str, torch.Tensor], counters: Mapping[str, int]) -> None:
        """Take over what `state` returned; raises ValueError when it is of another model."""
        self._masters.load_state(tensors, counters)

    def policy_weights(self) -> dict[str, torch.Tensor]:
        """The model's weights by name in the type that it computes in, tied ones once; live tensors, not copies."""
        return {name: parameter.detach() for name, parameter in self._model.named_parameters()}

    def _accumulate_gradients(self, inputs: MinibatchInputs, kl_coef: float) -> dict[str, float]:
        """Leave the minibatch's gradient with the masters; returns the means over its trained tokens."""
        hidden_size = self._model.config.get_text_config().hidden_size
        budget = self._config.tokens_per_micro_batch
        self._masters.zero_gradients()
        sums: defaultdict[str, float] = defaultdict(float)
        slots = padding = 0
        for micro_batch in plan_micro_batches(inputs.sequences, budget, hidden_size, inputs.trained):
            scored = packed_statistics(self._model, micro_batch, self._sampling)
            tokens = inputs.tokens.at(torch.from_numpy(micro_batch.places).to(self._model.device))
            loss, token_sums = grpo_loss(scored.log_probabilities, tokens, self._config, kl_coef)
            torch.autograd.backward(loss)
            self._masters.collect_gradients()
            difference = (scored.log_probabilities.detach() - tokens.old).abs().sum()
            token_sums |= {"loss": loss.detach(), "entropy": scored.entropy.sum(), _LOGP_DIFFERENCE: difference}
            for name, value in zip(token_sums, torch.stack(list(token_sums.values())).tolist(), strict=True):
                sums[name] += value
            slots += micro_batch.segments.size
            padding += micro_batch.padded_tokens
        trained = int(inputs.trained.sum())
        means = {name: value if name == "loss" else value / trained for name, value in sums.items()}
        return means | {"perf/padding_share": padding / slots}

    def _check_finite(self, metrics: Mapping[str, float], minibatch: Minibatch) -> None:
        loss, norm = metrics["loss"], metrics["optim/grad_norm"]
        if not (math.isfinite(loss) and math.isfinite(norm)):
            parameters = self._masters.non_finite_gradients()
            raise FloatingPointError(
                f"minibatch {self.applied} of the step has loss {loss:g} and gradient norm {norm:g}, not finite in "
                f"{len(parameters)} parameters ({', '.join(parameters[:3])}); its groups are "
                f"{', '.join(group.group_id for group in minibatch.groups)}; no weight was moved; lower learning.lr, "
                "or look for broken weights or log-probabilities"
            )

"""The value function of PPO: a scalar head on hidden states, of a trunk of its own or of the policy's."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from gyre_core.policy.logprobs import CausalLM, check_packed_states, predicting_states
from gyre_core.policy.models import check_all_loaded, without_dropout
from gyre_core.policy.packing import PromptCompletions, plan_micro_batches


@dataclass(frozen=True, slots=True)
class ValueModel:
    """The value of a state is the head on the hidden state that predicts the token taken in it."""

    trunk: PreTrainedModel
    """The model that makes the hidden states; the policy's own where `shared`."""
    head: nn.Linear
    shared: bool

    def parameters(self) -> dict[str, nn.Parameter]:
        """What belongs to the critic alone, by name: the head and, unless it is shared, the trunk."""
        parts = {"head": self.head} if self.shared else {"trunk": self.trunk, "head": self.head}
        return {
            f"{part}.{name}": tensor for part, module in parts.items() for name, tensor in module.named_parameters()
        }

    def values(self, states: torch.Tensor) -> torch.Tensor:
        """Values, `[tokens]` float32, of hidden states `[tokens, hidden]`."""
        weight, bias = self.head.weight.float(), self.head.bias.float()
        return nn.functional.linear(states.float(), weight, bias)[:, 0]


def shared_value_model(policy: CausalLM) -> ValueModel:
    """A value head on the policy's hidden states."""
    return ValueModel(policy, _head(policy), shared=True)


def own_value_model(policy: CausalLM, source: str | None) -> ValueModel:
    """A value model with a trunk of its own, in float32: that of the folder `source`, or a copy of the policy's.

    Raises ValueError for a folder whose model is not of the policy's vocabulary or cannot be read.
    """
    if source is None:
        trunk = copy.deepcopy(cast(PreTrainedModel, policy.base_model))
    else:
        trunk = _load_trunk(source, policy.config.get_text_config().vocab_size)
    torch.nn.Module.to(trunk, policy.device, torch.float32)
    return ValueModel(trunk, _head(trunk), shared=False)


def inspect_critic(source: str, vocabulary: int) -> int:
    """The parameters of the critic's trunk in a local folder, from its configuration alone: no weight is read.

    Raises ValueError for a folder that cannot be read, and for one of another vocabulary than the policy's.
    """
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True)
        with torch.device("meta"):
            trunk = AutoModel.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"models.critic: {source} cannot be read: {error}") from error
    held = config.get_text_config().vocab_size
    if held != vocabulary:
        raise ValueError(
            f"models.critic: {source} has a vocabulary of {held} tokens and the policy one of {vocabulary}, so token "
            "ids do not mean the same to both; choose a critic of the policy's family, or leave it out"
        )
    return sum(parameter.numel() for parameter in trunk.parameters())


@torch.no_grad()
def score_values(model: ValueModel, groups: Sequence[PromptCompletions], tokens_per_micro_batch: int) -> torch.Tensor:
    """The value of the state before every completion token of `groups`, flat and in order, `[tokens]` on the CPU."""
    values = torch.empty(sum(len(completion) for _, completions in groups for completion in completions))
    hidden_size = model.trunk.config.get_text_config().hidden_size
    for micro_batch in plan_micro_batches(groups, tokens_per_micro_batch, hidden_size):
        states = predicting_states(model.trunk, micro_batch)
        values[torch.from_numpy(micro_batch.places)] = model.values(states).cpu()
    return values


def _head(trunk: PreTrainedModel) -> nn.Linear:
    """A head that gives every state the value 0 until it is trained."""
    # Skipping the usual start leaves the global random state as it was.
    head = nn.utils.skip_init(nn.Linear, trunk.config.get_text_config().hidden_size, 1, device=trunk.device)
    assert isinstance(head, nn.Linear)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def _load_trunk(source: str, vocabulary: int) -> PreTrainedModel:
    """The base model of a folder that holds a causal language model or one for sequence classification."""
    inspect_critic(source, vocabulary)
    try:
        loaded: Any = AutoModel.from_pretrained(
            source, dtype=torch.float32, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"models.critic: {source} cannot be read: {error}") from error
    trunk, report = loaded
    check_all_loaded(report, f"models.critic: the weights in {source}")
    check_packed_states(without_dropout(trunk))
    return trunk

"""Load and save policies: Hugging Face folders on this machine, or `tiny-qwen3` made on the spot."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from gyre_core.config.sections import LoRAConfig, ModelsConfig, TinyModelConfig
from gyre_core.policy.lora import adapter_elements
from gyre_core.policy.tiny import tiny_config, tiny_model, tiny_tokenizer
from gyre_core.policy.tokens import SpecialTokens, special_tokens
from gyre_core.storage import system_errors

transformers_logging.disable_progress_bar()  # Local files load at once, and the run draws its own progress.

TINY = "tiny-qwen3"
"""The name under which a policy is made on the spot."""
_SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
"""Settings of Gemma 2 and its like that bound logits by a tanh."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A causal language model with its tokenizer.

    The model is in evaluation mode and has no dropout, whatever its mode, so that scoring and training see the
    same function.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    tokens: SpecialTokens
    max_positions: int
    """Tokens of prompt and completion together, at the most."""


@dataclass(frozen=True, slots=True)
class PolicySummary:
    """What a policy is like, read without its weights."""

    architecture: str
    parameters: int
    """Elements of the distinct weight tensors: tied ones count once."""
    trained: int
    """Elements that training moves: those of the adapters where there are some, else all."""
    dtype: str
    """Type in which the weights are stored."""
    vocabulary: int
    """Rows of the embedding; may exceed the tokenizer's own vocabulary."""
    max_positions: int
    layers: int
    hidden_size: int
    cache_elements: int
    """Elements of the keys and values that one position takes, over all layers."""


def load_policy(models: ModelsConfig, seed: int) -> Policy:
    """The policy that `models.policy` names, in float32, the master copy that a learner trains, on `models.device`.

    A folder is read from this machine only. Raises ValueError for one that is missing, holds no causal language
    model, no tokenizer, or not all weights, and for a device that is not there.
    """
    device = find_device(models.device)
    if models.policy == TINY:
        model, tokenizer = without_dropout(tiny_model(models.tiny, seed)), tiny_tokenizer()
    else:
        model, tokenizer = load_model(models.policy, torch.float32), load_tokenizer(models.policy)
    torch.nn.Module.to(model, device)
    return _policy(model, tokenizer)


def find_device(name: str) -> torch.device:
    """The device that `models.device` names; raises ValueError for a GPU that torch does not see."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError("models.device: cuda is asked for, but torch sees no GPU; set it to cpu or auto")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def load_model(source: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model of a local folder in `dtype`, in evaluation mode, without dropout.

    Raises ValueError like `load_policy`.
    """
    config = _read_config(source)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except OSError as error:
        raise ValueError(f"model folder {source}: its weights cannot be read: {error}") from error
    model, report = loaded
    check_all_loaded(report, f"model folder {source}: its weights")
    return without_dropout(model)


def check_all_loaded(report: Mapping[str, Any], weights: str) -> None:
    """Raise ValueError when transformers' report of a loading names weights that are missing or of another shape.

    `weights` begins the message: which weights, and where they lie.
    """
    missing = sorted(report["missing_keys"]) + sorted(str(mismatch) for mismatch in report["mismatched_keys"])
    if missing:
        raise ValueError(f"{weights} lack {missing[0]} and {len(missing) - 1} others")


def copy_policy(policy: Policy, dtype: torch.dtype) -> Policy:
    """The same policy with a model of its own in `dtype`, which takes no gradients: what an engine owns.

    Only weights are cast. Buffers, such as the frequencies of rotary positions, keep the precision they were made in.
    """
    # Cast one by one, so that no copy in the old type is made on the way.
    cast_ones: dict[int, Any] = {
        id(parameter): torch.nn.Parameter(parameter.detach().to(dtype, copy=True), requires_grad=False)
        for parameter in policy.model.parameters()
    }
    return replace(policy, model=copy.deepcopy(policy.model, cast_ones))


def copy_weights(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy a state dict, in any float type and on any device, into the model's own tensors.

    Of tensors that the model ties together, one name suffices. Raises ValueError that names a missing, unknown or
    misshapen tensor, or tied ones that differ; the model is then as it was.
    """
    held = model.state_dict(keep_vars=True)
    sources: dict[int, torch.Tensor] = {}
    for name, weight in weights.items():
        if name not in held:
            raise ValueError(f"the weights hold {name}, which the model lacks")
        if weight.shape != held[name].shape:
            raise ValueError(f"{name} has shape {tuple(weight.shape)}; the model's is {tuple(held[name].shape)}")
        first = sources.setdefault(id(held[name]), weight)
        if not torch.allclose(first, weight, rtol=0.0, atol=0.0, equal_nan=True):
            raise ValueError(f"{name} differs from a weight that the model ties to it")
    missing = [name for name, tensor in held.items() if id(tensor) not in sources]
    if missing:
        raise ValueError(f"the weights lack {missing[0]} and {len(missing) - 1} others")
    with torch.no_grad():
        for tensor in held.values():
            tensor.copy_(sources[id(tensor)])


def save_policy(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write weights (safetensors), configurations, tokenizer and chat template to `folder`.

    `AutoModelForCausalLM` and `AutoTokenizer` load it, and so does `load_policy`. Raises OSError for a full disk.
    """
    with system_errors(folder):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def inspect_policy(source: str, tiny: TinyModelConfig | None = None, lora: LoRAConfig | None = None) -> PolicySummary:
    """What the policy `source` is like, from its configuration alone: no weight is read or made.

    `tiny` is the shape of `tiny-qwen3`, and `lora` the adapters that it is to get. Raises ValueError like
    `load_policy`, and for adapters that it cannot have.
    """
    config = tiny_config(tiny or TinyModelConfig()) if source == TINY else _read_config(source)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return PolicySummary(
        architecture=type(model).__name__,
        parameters=parameters,
        trained=adapter_elements(model, lora) if lora is not None and lora.rank else parameters,
        dtype=str(config.dtype or torch.float32).removeprefix("torch."),
        vocabulary=config.vocab_size,
        max_positions=config.max_position_embeddings,
        layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        cache_elements=2 * text.num_hidden_layers * heads * head_size,
    )


def without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, in evaluation mode, with every dropout probability 0 in either mode.

    Attention reads its probability from an attribute, other dropouts are modules.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model.eval()


def _policy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Policy:
    tokens = special_tokens(tokenizer, model.config, model.generation_config)
    return Policy(model, tokenizer, tokens, model.config.max_position_embeddings)


def _read_config(source: str | Path) -> PreTrainedConfig:
    if not (Path(source) / "config.json").is_file():
        raise ValueError(
            f"model folder {source} does not exist or holds no config.json; give a Hugging Face folder on this "
            f"machine, or {TINY}"
        )
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise ValueError(f"model folder {source}: its config.json cannot be read: {error}") from error
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    named = config.architectures or []
    if kind is None or (named and kind.__name__ not in named):
        raise ValueError(f"model folder {source} holds {', '.join(named) or config.model_type}, not a causal LM")
    capped = [name for name in _SOFT_CAPS if getattr(config.get_text_config(), name, None) is not None]
    if capped:
        raise ValueError(
            f"model folder {source}: {config.model_type} caps its logits softly ({', '.join(capped)}), which the "
            "engine's attention and the chunked scoring leave out; choose another, such as Gemma 3"
        )
    if getattr(config, "max_position_embeddings", None) is None:
        raise ValueError(
            f"model folder {source}: {config.model_type} states no max_position_embeddings; choose another"
        )
    return config


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a local folder; raises ValueError for one that is missing or has no vocabulary."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise ValueError(f"model folder {source}: its tokenizer cannot be loaded: {error}") from error
    # Without files some tokenizer types come up all the same, with special tokens and nothing else.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ValueError(f"model folder {source}: its tokenizer has no vocabulary; are its tokenizer files missing?")
    return tokenizer

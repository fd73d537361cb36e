"""Low-rank adapters (Hu et al., 'LoRA', 2022, equation 3): W x + alpha / rank · B A x, of which A and B are trained.

They are PEFT's own layers put into the model in place, so that PEFT loads what is saved here. The rest of Gyre sees
whole weights under the base model's names: engines, versions and exports know nothing of adapters.
"""

from __future__ import annotations

import copy
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from gyre_core.config.sections import LoRAConfig
from gyre_core.storage import system_errors

if TYPE_CHECKING:
    import peft

_ALL_LINEAR = "all-linear"
_ADAPTER = "default"
"""PEFT's name for the one adapter of a model; part of the parameters' names."""
_BASE = ".base_layer."
"""What PEFT puts into the names of an adapted layer's own parameters."""


def require_peft() -> None:
    """Raise ValueError when the package behind adapters is not installed; imports nothing."""
    if find_spec("peft") is None:
        raise ValueError("models.lora needs the package peft; install it by `pip install gyre[lora]`")


def add_adapters(model: PreTrainedModel, config: LoRAConfig, seed: int) -> None:
    """Put adapters into the model, in place, and freeze all other weights.

    A is random, a function of `seed`, and B is 0, so that the model computes what it did before; both are float32.
    The global random state is as before. Raises ValueError for targets that are no linear layers of the model, for
    its head, and when PEFT is not installed.
    """
    require_peft()
    import peft

    assert config.rank > 0, "rank 0 means no adapters"
    settings = peft.LoraConfig(
        r=config.rank,
        # PEFT annotates a whole number, and computes with any.
        lora_alpha=cast(int, config.alpha if config.alpha is not None else 2 * config.rank),
        target_modules=_layer_names(model, config),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(settings, model, adapter_name=_ADAPTER)
    for parameter in trainable_parameters(model).values():
        parameter.data = parameter.data.float()


def adapted_copy(model: PreTrainedModel, config: LoRAConfig, seed: int) -> PreTrainedModel:
    """A model with adapters that shares all weights of `model`, which stays the base without them.

    Raises ValueError like `add_adapters`.
    """
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    adapted = copy.deepcopy(model, cast(dict[int, Any], shared))
    add_adapters(adapted, config, seed)
    return adapted


def adapter_elements(model: PreTrainedModel, config: LoRAConfig) -> int:
    """Elements that adapters would have on this model, without adding them; raises ValueError like `add_adapters`."""
    require_peft()
    names = _layer_names(model, config)
    layers = [layer for name, layer in _linear_layers(model) if name in names]
    return sum(config.rank * (layer.in_features + layer.out_features) for layer in layers)


def trainable_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The parameters that training moves, by their names in the model: the adapters, or all where there are none.

    Tied ones come once.
    """
    parameters = dict(model.named_parameters())
    adapters = {name: parameter for name, parameter in parameters.items() if _in_adapter(name)}
    return adapters or parameters


def merged_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's weights under the base model's names, tied ones once, with the adapters added to their layers.

    Each in its own type; the sums are made in float32 and rounded once. What has no adapter is live, not a copy.
    """
    weights: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if _in_adapter(name):
            continue
        weight = parameter.detach()
        layer_name, adapted, kind = name.partition(_BASE)
        if adapted and kind == "weight":
            weight = (weight.float() + _product(model.get_submodule(layer_name))).to(weight.dtype)
        weights[name.replace(_BASE, ".")] = weight
    return weights


def save_adapters(folder: Path, model: PreTrainedModel, base: str) -> None:
    """Write the model's adapters to a new folder in PEFT's format; `base` is the folder of the model beneath them.

    `PeftModel.from_pretrained(base_model, folder)` loads it. Raises OSError for a full disk.
    """
    settings = copy.copy(_settings(model))
    settings.base_model_name_or_path = base
    settings.inference_mode = True
    tensors = {
        f"base_model.model.{name.replace(f'.{_ADAPTER}.', '.')}": parameter.detach().contiguous()
        for name, parameter in trainable_parameters(model).items()
    }
    with system_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings.save_pretrained(str(folder))


def _layer_names(model: PreTrainedModel, config: LoRAConfig) -> list[str]:
    """The last parts of the names of the layers that get an adapter, sorted."""
    linear = {name for name, _ in _linear_layers(model)}
    wanted = linear if config.targets == (_ALL_LINEAR,) else set(config.targets)
    if unknown := sorted(wanted - linear):
        raise ValueError(
            f"models.lora.targets: {type(model).__name__} has no linear layers named {', '.join(unknown)}; it has "
            f"{', '.join(sorted(linear)) or 'none'} (the head takes no adapter), or set [{_ALL_LINEAR}]"
        )
    if not wanted:
        raise ValueError(
            f"models.lora.targets: {type(model).__name__} has no linear layers to adapt; set models.lora.rank to 0"
        )
    return sorted(wanted)


def _linear_layers(model: PreTrainedModel) -> list[tuple[str, nn.Linear]]:
    """The linear layers but the head, each with the last part of its name."""
    head = model.get_output_embeddings()
    return [
        (name.rpartition(".")[2], module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    ]


def _in_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def _product(layer: nn.Module) -> torch.Tensor:
    """What the adapter adds to the layer's weight, in float32, `[out, in]`."""
    adapted = cast(Any, layer)  # PEFT's own kind of layer.
    a, b = (matrices[_ADAPTER].weight.detach().float() for matrices in (adapted.lora_A, adapted.lora_B))
    return adapted.scaling[_ADAPTER] * (b @ a)


def _settings(model: PreTrainedModel) -> peft.LoraConfig:
    """The adapters' settings, which PEFT keeps on the model."""
    return cast(Any, model).peft_config[_ADAPTER]

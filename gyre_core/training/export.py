"""The trained policy as an ordinary Hugging Face folder, with a README that says where it comes from.

Of a run that trains adapters, the adapters alone can be had as well, in PEFT's format.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from gyre_core.policy.lora import add_adapters, save_adapters, trainable_parameters
from gyre_core.policy.models import Policy, copy_weights, save_policy
from gyre_core.storage import unwatched
from gyre_core.training.checkpoints import open_checkpoints
from gyre_core.training.policies import find_start_policy, load_start_policy
from gyre_core.training.run_folder import RunFolder, replacing, run_storage
from gyre_core.types import PolicyVersion
from gyre_core.weights.chain import VersionChain

EXPORT = "export"
ADAPTER = "adapter"

_README = """\
---
library_name: {library}
pipeline_tag: text-generation
{base}tags: [reinforcement-learning, {algorithm}, gyre]
---
# {name}

{contents} of the run `{key}`, trained by {algorithm} from `{policy}`.

```python
{loading}
```

`gyre.yaml` beside this file is the configuration of the run.
"""
_LOADING_POLICY = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}")"""
_LOADING_ADAPTER = """\
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("{base}")
model = PeftModel.from_pretrained(base, "{folder}")"""


def export_run(run: str, output: str, to: str | None = None) -> Path:
    """Export the newest policy version of a run; returns the folder, by default `export/` in the run folder.

    Raises ValueError for an unknown run, a run without a published version, or a `to` that is there and not an empty
    folder.
    """
    folder = RunFolder.find(run, output)
    config = folder.config()
    chain = VersionChain(run_storage(config, folder))
    versions = chain.versions()
    if not versions:
        raise ValueError(f"the run {folder.key} has published no policy version yet; there is nothing to export")
    target = _find_target(folder, EXPORT, to)
    policy = load_start_policy(config, folder)
    copy_weights(policy.model, chain.load(versions[-1]))
    write_export(policy, folder, versions[-1], target)
    return target


def export_adapter(run: str, output: str, to: str | None = None) -> Path:
    """Export the adapters of a run's newest full checkpoint; returns the folder, by default the run's `adapter/`.

    Raises ValueError for an unknown run, one that trains no adapters, one without a checkpoint, and a `to` that is
    there and not an empty folder.
    """
    folder = RunFolder.find(run, output)
    config = folder.config()
    if not config.models.lora.rank:
        raise ValueError(
            f"the run {folder.key} trains no adapters (models.lora.rank is 0); export it without --adapter"
        )
    checkpoint = open_checkpoints(config, folder).newest_full()
    if checkpoint is None:
        raise ValueError(f"the run {folder.key} has no checkpoint yet, which its adapters are taken from")
    target = _find_target(folder, ADAPTER, to)
    model = load_start_policy(config, folder).model
    add_adapters(model, config.models.lora, config.experiment.seed)
    with torch.no_grad():
        for name, parameter in trainable_parameters(model).items():
            parameter.copy_(checkpoint.tensors[f"weight.{name}"])
    base = find_start_policy(config, folder)
    with replacing(target) as unfinished:
        save_adapters(unfinished, model, base)
        _describe(
            folder,
            unfinished,
            contents=f"Adapters after step {checkpoint.step}",
            loading=_LOADING_ADAPTER.format(base=base, folder=target.name),
            library="peft",
            base=f"base_model: {base}\n",
        )
    return target


def write_export(
    policy: Policy,
    folder: RunFolder,
    version: PolicyVersion,
    target: Path,
    require_owned: Callable[[], None] = unwatched,
) -> None:
    """Write the policy to `target`, whole or not at all; what `require_owned` raises leaves what is there."""
    dtype = getattr(torch, folder.config().models.dtype)
    with replacing(target, require_owned) as unfinished:
        save_policy(unfinished, policy.model.to(dtype), policy.tokenizer)
        _describe(
            folder,
            unfinished,
            contents=f"Policy version {version.number}",
            loading=_LOADING_POLICY.format(folder=target.name),
            library="transformers",
        )


def _find_target(folder: RunFolder, name: str, to: str | None) -> Path:
    target = Path(to).absolute() if to else folder.path / name
    if to and target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"{target} is not an empty folder; export to a new one")
    return target


def _describe(folder: RunFolder, target: Path, *, contents: str, loading: str, library: str, base: str = "") -> None:
    """Write the README and the run's configuration; `base` is a line of the README's header."""
    config = folder.config()
    (target / "gyre.yaml").write_text((folder.path / "config.yaml").read_text())
    (target / "README.md").write_text(
        _README.format(
            library=library,
            base=base,
            algorithm=config.experiment.algorithm,
            name=config.experiment.name,
            contents=contents,
            key=folder.key,
            policy=config.models.policy,
            loading=loading,
        )
    )

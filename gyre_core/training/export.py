"""The trained policy as an ordinary Hugging Face folder, with a README that says where it comes from."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from gyre_core.policy.models import Policy, copy_weights, save_policy
from gyre_core.training.policies import load_start_policy
from gyre_core.training.run_folder import RunFolder, run_storage
from gyre_core.types import PolicyVersion
from gyre_core.weights.chain import VersionChain

EXPORT = "export"

_README = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [reinforcement-learning, {algorithm}, gyre]
---
# {name}

Policy version {version} of the run `{key}`, trained by {algorithm} from `{policy}`.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}")
```

`gyre.yaml` beside this file is the configuration of the run.
"""


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
    target = Path(to).absolute() if to else folder.path / EXPORT
    if to and target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"{target} is not an empty folder; export to a new one")
    policy = load_start_policy(config, folder)
    copy_weights(policy.model, chain.load(versions[-1]))
    write_export(policy, folder, versions[-1], target)
    return target


def write_export(policy: Policy, folder: RunFolder, version: PolicyVersion, target: Path) -> None:
    """Write the policy to `target`, whole or not at all: beside it first, then in its place."""
    config = folder.config()
    unfinished = target.with_name(f".{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    dtype = getattr(torch, config.models.dtype)
    save_policy(unfinished, policy.model.to(dtype), policy.tokenizer)
    (unfinished / "gyre.yaml").write_text((folder.path / "config.yaml").read_text())
    (unfinished / "README.md").write_text(
        _README.format(
            algorithm=config.experiment.algorithm,
            name=config.experiment.name,
            version=version.number,
            key=folder.key,
            policy=config.models.policy,
            folder=target.name,
        )
    )
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)

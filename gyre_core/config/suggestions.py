"""What somebody who wrote an unknown key most likely meant."""

from __future__ import annotations

import difflib

from gyre_core.config.fields import list_fields, list_keys

NEAR = 0.7
"""Share of common characters (`difflib`) from which two names resemble each other."""

FOREIGN_NAMES = {
    "learning_rate": "learning.lr",
    "beta": "learning.kl_coef",
    "weight_decay_rate": "learning.weight_decay",
    "gradient_clipping": "learning.max_grad_norm",
    "epsilon": "learning.clip_low",
    "epsilon_high": "learning.clip_high",
    "loss_type": "learning.loss_aggregation",
    "num_generations": "rollout.samples_per_prompt",
    "group_size": "rollout.samples_per_prompt",
    "max_completion_length": "rollout.max_tokens",
    "max_new_tokens": "rollout.max_tokens",
    "max_steps": "experiment.steps",
    "output_dir": "experiment.output",
    "run_name": "experiment.name",
    "model": "models.policy",
    "model_name_or_path": "models.policy",
    "dataset": "data.path",
    "reward_funcs": "reward.functions",
}
"""Names that other trainers of the field give to Gyre's settings."""


def suggest_key(key: str) -> str:
    """A remedy for an unknown key, `section.field` or a bare name, as the last part of a sentence.

    A field of that very name elsewhere, another trainer's name for a field, and near names in the same section come
    first; then near names anywhere; then the list of the keys that there are.
    """
    section, _, name = key.rpartition(".")
    fields = [field.name for field in list_fields()]
    if key in fields:
        return f"write `{name}` below `{section}:`."
    name = name.lower().replace("-", "_")
    own = list_keys(section)
    siblings = own or list_keys("")
    found = sorted((known for known in fields if _last(known) == name), key=lambda known: known.count("."))
    found += [FOREIGN_NAMES[name]] if name in FOREIGN_NAMES else []
    found += _nearest(name, {_last(sibling): sibling for sibling in siblings})
    if not found:
        # The whole name helps where the section is misspelt; within a known section it only resembles its neighbours.
        found = [] if own else _nearest(key.lower(), {known: known for known in fields})
        found = found or _nearest(name, FOREIGN_NAMES | {_last(known): known for known in fields})
    if found:
        return f"did you mean {' or '.join(dict.fromkeys(found))}?"
    return f"known here: {', '.join(_last(sibling) for sibling in siblings)}."


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _nearest(name: str, meanings: dict[str, str]) -> list[str]:
    """What the known name nearest to `name` stands for, if one is near; all of those that are equally near."""
    ratios = {known: difflib.SequenceMatcher(None, known, name).ratio() for known in meanings}
    best = max(ratios.values(), default=0.0)
    return [meanings[known] for known, ratio in ratios.items() if ratio == best >= NEAR]

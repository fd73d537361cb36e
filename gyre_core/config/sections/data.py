"""The section `data`: where prompts come from."""

from __future__ import annotations

from gyre_core.config.sections.base import NonNegativeInt, PositiveInt, Section, Text


class DataConfig(Section):
    """Where prompts come from."""

    path: Text = "arithmetic"
    """A JSONL file of prompts, or `arithmetic` for built-in sums of two-digit numbers."""
    evaluation_path: Text | None = None
    """A JSONL file of held-out prompts; without it, `evaluation_size` rows are held out of `path`."""
    evaluation_size: NonNegativeInt = 256
    """Prompts held out for evaluation when `evaluation_path` is not given."""
    prompt_column: Text = "prompt"
    """Column that holds the prompt: text, or a list of chat messages."""
    max_prompt_tokens: PositiveInt = 1024
    """A longer prompt is dropped before the run, and counted in the plan."""
    shuffle: bool = True
    """Reshuffle the prompts in every epoch, by seed."""
    size: PositiveInt = 6000
    """Prompts that `arithmetic` makes for training, all distinct."""

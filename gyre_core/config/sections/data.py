"""The section `data`: where prompts come from."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gyre_core.config.sections.base import NonNegativeInt, PositiveInt, Section, Text


class DataConfig(Section):
    """Where prompts come from."""

    path: Text = "arithmetic"
    """A JSONL or Parquet file of prompts, a folder of them, a saved Hugging Face data set, `reasoning_gym:TASK`, or
    `arithmetic` for built-in sums of two-digit numbers."""
    evaluation_path: Text | None = None
    """A file, folder, data set or task of held-out prompts; without it, `evaluation_size` rows are held out of
    `path`."""
    parameters: dict[str, Any] = Field(default={})
    """Parameters of the task of `reasoning_gym:TASK`, by name."""
    evaluation_size: NonNegativeInt = 256
    """Prompts held out for evaluation when `evaluation_path` is not given, or made of the task that it names."""
    prompt_column: Text = "prompt"
    """Column that holds the prompt: text, or a list of chat messages."""
    system_prompt: Text | None = None
    """System message before every prompt; a prompt that is text becomes the user's message after it."""
    as_chat: bool = False
    """Send a prompt that is text through the model's chat template, as the user's message."""
    max_prompt_tokens: PositiveInt = 1024
    """A longer prompt is dropped before the run, and counted in its log and by `gyre preflight`."""
    shuffle: bool = True
    """Reshuffle the prompts in every epoch, by seed."""
    size: PositiveInt = 6000
    """Prompts that `arithmetic`, or a task of `reasoning_gym`, makes for training."""

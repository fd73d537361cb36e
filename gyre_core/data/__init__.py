"""Prompts: read from files or made on the spot, split, turned into tokens, and dealt out step by step."""

from gyre_core.data.cursor import PromptCursor
from gyre_core.data.prompts import PromptRow, PromptSet, PromptSplits, load_prompts, tokenize

__all__ = ["PromptCursor", "PromptRow", "PromptSet", "PromptSplits", "load_prompts", "tokenize"]

"""Prompts: read from files or made on the spot, split, turned into tokens, and dealt out step by step."""

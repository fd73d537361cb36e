"""Inference engines: what generates completions with a loaded policy version."""

"""A training run: its parts, the stages of its steps, and what it leaves behind."""

"""Scoring of completions: reward functions run in a process of their own, under a deadline."""

"""Scoring of completions: reward functions run in processes of their own, under a deadline."""

"""Prefect flows: a run, its steps and its evaluations."""

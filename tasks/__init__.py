"""Prefect tasks: the stages of a step."""

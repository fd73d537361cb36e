"""Prefect flows, and the command line."""

"""Prefect blocks: what Gyre keeps in Prefect for its runs, such as credentials."""

"""Checkpoints: what an exact resume needs, written whole or not at all."""

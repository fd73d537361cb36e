"""Policies: models with their tokenizers, loaded, saved, made on the spot, and scored."""

"""Policy versions: published once, verified by digest."""

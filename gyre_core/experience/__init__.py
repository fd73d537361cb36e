"""The experience pool: immutable segments in storage, and the owner's index over them in memory."""

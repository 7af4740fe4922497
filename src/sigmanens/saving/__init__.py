"""Checkpoints: what the members add to a base network."""

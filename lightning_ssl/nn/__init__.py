"""Backbones, heads, batch-norm parts: what the methods are built from."""

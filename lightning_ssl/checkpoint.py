"""Moved to `lightning_ssl.runs.checkpoint`."""

from lightning_ssl.runs.checkpoint import *  # noqa: F403

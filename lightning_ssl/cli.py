"""Moved to `lightning_ssl.runs.cli`."""

from lightning_ssl.runs.cli import *  # noqa: F403

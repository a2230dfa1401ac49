"""Moved to `lightning_ssl.runs.loggers`."""

from lightning_ssl.runs.loggers import *  # noqa: F403

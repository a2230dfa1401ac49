"""Finds the silent bugs of self-supervised code before the first epoch, in anybody's LightningModule."""

from lightning_ssl.doctor.examine import CHECKS, assert_healthy, examine
from lightning_ssl.doctor.report import Finding, Report, Result

__all__ = ["CHECKS", "Finding", "Report", "Result", "assert_healthy", "examine"]

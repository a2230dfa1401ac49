"""The console script `lightning-ssl`."""

from __future__ import annotations


def main(args: list[str] | None = None) -> None:
    """Run `lightning-ssl` with `args` (default: the command line)."""
    from lightning.pytorch.cli import LightningCLI

    LightningCLI(args=args)

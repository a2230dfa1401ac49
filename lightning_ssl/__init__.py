"""The microscope for self-supervised training in PyTorch Lightning."""

from importlib.metadata import version

__version__ = version("lightning-ssl")

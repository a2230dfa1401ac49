"""Places in a stranger's module, named by dotted paths."""

from __future__ import annotations

import difflib

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_ssl._lightning import overrides


def find_module(pl_module: nn.Module, path: str, argument: str) -> nn.Module:
    """Return the submodule at `path`, or raise with the paths there are and the nearest to the one asked for."""
    try:
        return pl_module.get_submodule(path)
    except (AttributeError, TypeError):
        raise MisconfigurationException(_unknown_path(pl_module, path, argument)) from None


def check_path(pl_module: LightningModule, path: str, argument: str) -> nn.Module | None:
    """`find_module` for `setup`, where a module that is built later (`setup`, `configure_model`) is not there yet."""
    if not isinstance(path, str) or not path:
        raise MisconfigurationException(
            f"`{argument}` must be the dotted path of a submodule of {type(pl_module).__name__}, got {path!r}"
        )
    later = overrides(pl_module, "setup") or overrides(pl_module, "configure_model")
    try:
        return find_module(pl_module, path, argument)
    except MisconfigurationException:
        if later:
            return None
        raise


def _unknown_path(pl_module: nn.Module, path: str, argument: str) -> str:
    known = [name for name, _ in pl_module.named_modules() if name]
    nearest = difflib.get_close_matches(path, known, n=3, cutoff=0.4)
    lines = [f"`{argument}` names {path!r}, which {type(pl_module).__name__} does not have."]
    if nearest:
        lines.append("Did you mean " + " or ".join(repr(name) for name in nearest) + "?")
    # The whole tree of a ResNet is no help; what stands at the first two levels is.
    shallow = [name for name in known if name.count(".") < 2]
    shown = ", ".join(shallow[:40]) + (", ..." if len(shallow) > 40 else "")
    lines.append(f"Submodules there are: {shown or 'none'}.")
    return " ".join(lines)

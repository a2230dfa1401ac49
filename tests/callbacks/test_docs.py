"""The page's snippets run, and its pictures are there and small."""

from __future__ import annotations

import re
from pathlib import Path

import lightning.pytorch as L
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "callbacks.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="an installed package has no docs")


def test_snippets_run():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) >= 9
    for block in blocks:
        exec(block, {"L": L})


def test_pictures():
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", PAGE.read_text())
    assert len(pictures) >= 8
    for picture in pictures:
        assert (PAGE.parent / picture).stat().st_size < 60_000

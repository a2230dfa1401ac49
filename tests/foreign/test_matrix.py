"""Every network of the matrix at both sizes, each with one of the methods in turn; `python -m tests.matrix` has all."""

from pathlib import Path

import pytest

from tests.matrix import DIAGONAL, METHODS, check, write_images

pytest.importorskip("timm")


@pytest.mark.slow
@pytest.mark.parametrize("case", DIAGONAL, ids=str)
def test_a_network_by_name(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lightning-ssl"])
    monkeypatch.delenv("LIGHTNING_SSL_RUN", raising=False)
    write_images(Path("images"))
    check(case)


def test_every_method_takes_part():
    assert all(sum(case.method == method for case in DIAGONAL) >= 2 for method in METHODS)

"""`lightning-ssl doctor`: what it builds, prints, writes and returns."""

import json

import pytest

from lightning_ssl.runs.cli import main


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lightning-ssl"])
    return tmp_path


def run(*args):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *args])
    return ended.value.code


STRANGER = """
model:
  class_path: tests.doctor.modules.Siamese
  init_args: {bug: never_moves}
data:
  class_path: tests.doctor.data.PairsModule
"""


def test_a_strangers_config(folder, capsys):
    (folder / "run.yaml").write_text(STRANGER)
    assert run("--config=run.yaml", "--checks=target,optimizer", "--json=found.json") == 1
    printed = capsys.readouterr().out
    assert "Siamese: 1 thing wrong" in printed and "did not change" in printed and "optimizer  ok" in printed
    found = json.loads((folder / "found.json").read_text())
    assert found["checks"]["target"]["findings"][0]["kind"] == "target_never_moves"
    assert sorted(path.name for path in folder.iterdir()) == ["found.json", "run.yaml"]


@pytest.mark.slow
def test_a_method_of_ours_with_its_own_recipe(folder, capsys):
    assert run("--model=SimSiam", "--data.batch_size=16", "--checks=ranks,optimizer,gradients", "--json=-") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["healthy"] and list(found["checks"]) == ["ranks", "optimizer", "gradients"]
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    "args, words",
    [
        (["--checks=rank"], "there are ranks, views"),
        (["--json=nowhere/out.json"], "its folder does not exist"),
        (["--ranks=1"], "`ranks` must be"),
        (["--model=Nobody"], "Nobody"),
    ],
)
def test_what_it_refuses(folder, capsys, args, words):
    assert run(*args) == 2
    assert words in capsys.readouterr().err

"""`embed` and `export`: features of every split for scikit-learn, the backbone for torchvision, timm and others."""

import numpy as np
import pytest
import torch
import torchvision
from sklearn.linear_model import LogisticRegression

from lightning_ssl.runs.cli import main
from lightning_ssl.runs.export import load_backbone
from tests.test_cli import SHORT


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of a network by name; returns what makes it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lightning-ssl"])
    monkeypatch.delenv("LIGHTNING_SSL_RUN", raising=False)

    def fit(*flags):
        off = ["--linear", "false", "--knn", "false", "--covariance_operator_norm", "false"]
        main(["fit", *SHORT, "--trainer.max_epochs=1", "--trainer.limit_val_batches=0", "--name=a", *off, *flags])

    return fit


def ended(*words):
    with pytest.raises(SystemExit) as end:
        main(list(words))
    return end.value.code


@pytest.mark.slow
def test_embeddings_of_all_splits_train_a_classifier_elsewhere(run, tmp_path):
    run()
    main(["embed", "runs/a", "--output", "all.npz"])
    with np.load("all.npz") as file:
        found = dict(file)
    train, test = found["split"] == "train", found["split"] == "test"
    assert (train.sum(), test.sum()) == (1437, 360)
    assert all(sorted(found["index"][part]) == list(range(part.sum())) for part in (train, test))
    fitted = LogisticRegression(max_iter=200).fit(found["features"][train], found["label"][train])
    assert fitted.score(found["features"][test], found["label"][test]) > 0.3  # ten classes
    main(["predict", "--config", "runs/a/config.yaml", "--ckpt_path", "runs/a/checkpoints/last.ckpt"])
    with np.load("embeddings.npz") as file:
        np.testing.assert_array_equal(file["features"], found["features"][test])
    pytest.importorskip("pyarrow")
    from pyarrow import parquet

    main(["embed", "runs/a/checkpoints/last.ckpt", "--output", "all.parquet"])
    table = parquet.read_table("all.parquet")
    np.testing.assert_array_equal(np.stack(table["features"].to_numpy()), found["features"])
    assert table["split"].to_pylist() == found["split"].tolist()


@pytest.mark.slow
def test_backbones_load_where_they_come_from(run, tmp_path, capsys):
    run("--model.backbone", "resnet18", "--model.stem", "imagenet")
    backbone = load_backbone(tmp_path / "runs/a/checkpoints/last.ckpt")
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = backbone(x)
        assert ended("export", "runs/a", "--output", "weights.pt") == 0
        theirs = torchvision.models.resnet18()
        missing = theirs.load_state_dict(torch.load("weights.pt", weights_only=True), strict=False)
        assert missing.missing_keys == ["fc.weight", "fc.bias"] and not missing.unexpected_keys
        theirs.fc = torch.nn.Identity()
        assert torch.equal(theirs.eval()(x), expected)
        assert ended("export", "runs/a", "--output", "weights.ts") == 0
        torch.testing.assert_close(torch.jit.load("weights.ts")(x), expected)
    assert "read back" in capsys.readouterr().out


@pytest.mark.slow
def test_timms_backbones_load_in_timm(run, tmp_path):
    timm = pytest.importorskip("timm")
    from safetensors.torch import load_file

    run("--model.backbone", "timm/vit_tiny_patch16_224")
    assert ended("export", "runs/a", "--output", "vit.safetensors") == 0
    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=0, dynamic_img_size=True)
    theirs.load_state_dict(load_file("vit.safetensors"))
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        backbone = load_backbone(tmp_path / "runs/a/checkpoints/last.ckpt")
        assert torch.equal(theirs.eval()(x), backbone(x))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["embed"], "embed needs a run"),
        (["embed", "nothing"], "'nothing' must be a run's folder or a checkpoint in it"),
        (["export", "nothing"], "'nothing' must be a run's folder or a checkpoint in it"),
        (["export", "nothing", "--output", "weights.xyz"], "--output must end in one of .pt"),
        (["export", "nothing", "--output", "no/where.pt"], "its folder does not exist"),
    ],
)
def test_what_cannot_be_exported_is_refused(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    assert ended(*words) == 2
    assert said in capsys.readouterr().err

"""Networks that are not ours: by import path, from timm and torchvision, as objects."""

import lightning.pytorch as L
import pytest
import torch
import torchvision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_ssl import methods
from lightning_ssl.data import HLTMDataModule, ImageDataModule
from lightning_ssl.nn import MLPBackbone, build_backbone, num_features
from lightning_ssl.nn.backbones import check_input
from lightning_ssl.runs.cli import main
from tests.test_cli import SHORT

SLOW = pytest.mark.slow


def small_vit(**options):
    sizes = dict(image_size=32, patch_size=16, num_layers=1, num_heads=2, hidden_dim=16, mlp_dim=16)
    return torchvision.models.VisionTransformer(**sizes, **options)


class Lying(nn.Module):
    """Says one number of features and gives another, as timm's MobileNets do."""

    num_features = 7

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.conv(x).mean(dim=(2, 3))


def test_the_features_are_counted_and_not_believed():
    backbone = Lying()
    backbone.dropout.eval()
    state = torch.random.get_rng_state()
    assert num_features(backbone) == 5
    assert torch.equal(state, torch.random.get_rng_state())
    assert backbone.training and not backbone.dropout.training


@pytest.mark.parametrize("name", ["mobilenetv3_small_050", "resnet10t", "vit_tiny_patch16_224"])
def test_timms_features_are_those_that_come_out(name):
    timm = pytest.importorskip("timm")
    made = build_backbone(timm.create_model(name))  # as people make them, with a classifier
    with torch.no_grad():
        features = made.eval()(torch.randn(2, 3, 224, 224))
    assert features.shape == (2, num_features(made)) and features.std() > 0
    if name.startswith("mobilenet"):  # a size that the attribute does not tell
        assert made.num_features != num_features(made)


def test_a_classifier_is_taken_off_and_a_head_of_ones_own_is_not():
    x = torch.randn(2, 3, 32, 32)
    vit = build_backbone(small_vit())
    assert vit(x).shape == (2, 16) and vit(x).std() > 0.1  # torchvision starts the classifier at zero
    assert build_backbone(vit) is vit and num_features(vit) == 16  # nothing more is taken off
    assert num_features(build_backbone(small_vit(num_classes=10))) == 10
    assert num_features(build_backbone("torchvision.models.resnet18")) == 512


def test_what_cannot_be_a_backbone_is_refused():
    for path, words in [
        ("torchvision.models.nothing", "has no attribute 'nothing'"),
        ("no_such_package.Net", "No module named 'no_such_package'"),
        ("torch.nn.Linear", "in_features"),
        ("torch.initial_seed", "must make a torch.nn.Module, got int"),
        ("resnet_18", "did you mean 'resnet18'"),
        ("squeezenet1_0", "must end in a linear classifier"),
    ]:
        with pytest.raises(ValueError, match=words):
            build_backbone(path)
    with pytest.raises(ValueError, match=r"must map images .* got 32 x 32: features of shape \[2, 3, 32, 32\]"):
        num_features(nn.Identity())


def test_sizes_that_do_not_fit_are_named_with_those_that_do():
    vit = build_backbone(small_vit())
    check_input(vit, (3, 32, 32), 16)
    with pytest.raises(ValueError, match=r"\[3, 64, 64\].*Wrong image height.*that works: 32$"):
        check_input(vit, (3, 64, 64), 16)
    with pytest.raises(ValueError, match=r"samples of shape \[8\].*--model.backbone.in_features 8"):
        check_input(MLPBackbone(), HLTMDataModule(depth=3, draws=64, batch_size=16).input_shape, 128)


@pytest.mark.parametrize("name", methods.__all__)
def test_every_method_refuses_a_size_before_its_first_step(name):
    method = getattr(methods, name)(backbone=small_vit())
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_steps=1)
    with pytest.raises(MisconfigurationException, match=r"\[3, 64, 64\].*that works: 32$"):
        trainer.fit(method, datamodule=ImageDataModule(image_size=64, batch_size=4))


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LIGHTNING_SSL_RUN", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))  # taken out again
    (tmp_path / "their_net.py").write_text(
        "import torch.nn as nn\n\n\nclass Net(nn.Sequential):\n    def __init__(self, width: int = 8):\n"
        "        super().__init__(nn.Conv2d(3, width, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())\n"
        "\n\ndef fixed():\n    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 8))\n"
    )
    return tmp_path


@pytest.mark.slow
def test_a_network_in_a_file_of_ones_own_and_its_saved_config(own):
    short = [
        *SHORT,
        "--trainer.max_epochs=1",
        "--trainer.limit_val_batches=0",
        "--linear",
        "false",
        "--covariance_operator_norm",
        "false",
    ]
    main(["fit", "--model.backbone", "their_net.Net", *short, "--name", "plain"])
    main(["fit", "--model.backbone", "their_net.Net", "--model.backbone.width", "4", *short, "--name", "four"])
    for name, width in (("plain", 8), ("four", 4)):
        main(["fit", "--config", f"runs/{name}/config.yaml", "--name", f"{name}-again"])
        for run in (name, f"{name}-again"):
            state = torch.load(f"runs/{run}/checkpoints/last.ckpt", weights_only=True)["state_dict"]
            assert len(state["backbone.0.weight"]) == width


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model.backbone", "their_net.Nets"], "has no attribute 'Nets'"),
        (["--model.backbone", "their_net.fixed"], "set --data.image_size to one that works: 64"),
        (["--data", "HLTMDataModule", "--model.backbone", "mlp"], "set --model.backbone.in_features 32"),
        pytest.param(
            ["--model.backbone", "vit_b_16"], "(Wrong image height! Expected 224 but got 32!); set", marks=SLOW
        ),
        pytest.param(["--model=SimCLR", "--model.backbone=vit_b_16"], "image_size to one that works: 224", marks=SLOW),
    ],
)
def test_failures_are_one_line(own, capsys, flags, words):
    with pytest.raises(SystemExit) as ended:
        main(["fit", *flags, *SHORT])
    assert ended.value.code == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lightning-ssl: error:")]
    assert len(said) == 1 and words in said[0]

"""Modules of other packages as they are installed: torchgeo's tasks, timm's and Hugging Face's networks."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from tests.foreign import data
from tests.foreign.case import PYTORCH_LIGHTNING, Built, Case, Operator, Probed
from tests.foreign.truth import interleaved
from tests.foreign.zoo_plain import predicted, stranger

# torchgeo ------------------------------------------------------------------------------------------------------------

BANDS = (data.Items(data.dicts(24, (4, 32, 32), seed=5).items), data.Items(data.dicts(16, (4, 32, 32), seed=6).items))


def _task(name: str, **kwargs: Any) -> Built:
    from torchgeo import trainers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchgeo's advice on hyperparameters
        module = getattr(trainers, name)(model="test_resnet", in_channels=4, **kwargs)
    return Built(module, data.dicts(24, (4, 32, 32)), data.dicts(8, (4, 32, 32), seed=3))


def byol_task() -> Built:
    return _task("BYOLTask")


def simclr_task(version: int) -> Built:
    return _task(
        "SimCLRTask",
        version=version,
        layers=1 + version,
        hidden_dim=8,
        output_dim=6,
        lr=0.1,
        memory_bank_size=0,
        size=32,
    )


def moco_task(version: int) -> Built:
    return _task(
        "MoCoTask",
        version=version,
        layers=3 if version == 3 else 2,
        hidden_dim=8,
        output_dim=96 if version == 1 else 6,
        lr=0.01,
        memory_bank_size=0 if version == 3 else 48,
        size=32,
    )


def seasonal() -> Built:
    """Two images of a place in one tensor of twice the channels, which torchgeo's tasks take apart."""
    built = simclr_task(2)
    first, second = data.dicts(24, (4, 32, 32)).items, data.views_of(data.samples(24, (4, 32, 32))[0], 1)
    items = [{**item, "image": torch.cat([item["image"], other[0]])} for item, other in zip(first, second, strict=True)]
    return Built(built.module, data.Items(items))


def _bands(encoder: str, **kwargs: Any) -> Probed:
    return Probed(encoder, *BANDS, rows=lambda module, batch: module.get_submodule(encoder)(batch["image"]), **kwargs)


_GEO: dict[str, Any] = {"needs": ["torchgeo", "timm", "kornia"], "batch": 8}
_GEO_LAYERS = ("backbone.conv1.0", "projection_head.layers.0")

TORCHGEO = [
    Case(
        "torchgeo_byol",
        byol_task,
        "model.backbone",
        predictor="model.predictor",
        predictor_keys=frozenset({"eigenvalue_max"}),  # 16 rows of 256 numbers: the other eigenvalues are 0
        operator=Operator(
            "model.backbone",
            "model.backbone.model.conv1",
            ("model.backbone.model.conv1.0",),
            layout="NCHW",
            declared={"layout": "NCHW"},
            value=False,
            samples=2,
        ),
        probed=_bands("model.backbone"),
        **{**_GEO, "batch": 4},
        slow=True,
    ),
    Case(
        "torchgeo_byol_inner",
        byol_task,
        "model.backbone.model.global_pool",
        **{**_GEO, "batch": 4},
        slow=True,
    ),
    Case(
        "torchgeo_simclr_v1",
        lambda: simclr_task(1),
        "projection_head",
        operator=Operator("backbone", "projection_head", _GEO_LAYERS),
        probed=_bands("backbone"),
        **_GEO,
    ),
    Case(
        "torchgeo_simclr_v2",
        lambda: simclr_task(2),
        "backbone",
        operator=Operator("backbone", "projection_head", _GEO_LAYERS),
        **_GEO,
    ),
    Case("torchgeo_seasonal", seasonal, "projection_head", **_GEO),
    Case(
        "torchgeo_moco_v1",
        lambda: moco_task(1),
        "backbone",
        target="backbone_momentum",
        # The crops of noise are no closer than two samples: that the keys come in order has to be said.
        declared={"target": "backbone_momentum", "pairing": "calls"},
        probed=_bands("backbone"),
        **_GEO,
    ),
    Case(
        "torchgeo_moco_v2",
        lambda: moco_task(2),
        "projection_head",
        target="projection_head_momentum",
        declared={"target": "projection_head_momentum"},
        value=False,
        **_GEO,
    ),
    Case(
        "torchgeo_moco_v3",
        lambda: moco_task(3),
        "projection_head",
        predictor="prediction_head",
        operator=Operator("backbone", "projection_head", _GEO_LAYERS),
        probed=_bands("backbone"),
        **_GEO,
    ),
]

# Backbones -----------------------------------------------------------------------------------------------------------


def _timm(name: str, **kwargs: Any) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=0, **kwargs)


def vit(**kwargs: Any) -> nn.Module:
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "mlp_ratio": 1}
    return _timm("vit_tiny_patch16_224", **sizes, **kwargs)


def swin() -> nn.Module:
    sizes = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 8, "depths": (1, 1), "num_heads": (2, 2)}
    return _timm("swin_tiny_patch4_window7_224", **sizes, drop_path_rate=0.0)


def convnext() -> nn.Module:
    return _timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16))


def checkpointed_vit() -> nn.Module:
    network = vit()
    network.set_grad_checkpointing(True)  # type: ignore[operator]
    return network


def around(backbone: nn.Module, width: int, size: int = 16, package: str = "lightning.pytorch") -> Built:
    """Somebody's project around a backbone: two views, a head, a predictor."""

    def step(self: Any, batch: Any) -> Tensor:
        return predicted(self, *(self.projector(self.backbone(x)) for x in batch[0]))

    parts = {"backbone": backbone, "projector": nn.Linear(width, 6), "predictor": nn.Linear(6, 6)}
    return Built(stranger(parts, step, package, adam=True), data.pairs(shape=(3, size, size)))


def interleaved_vit() -> Built:
    def step(self: Any, batch: Any) -> Tensor:
        z = self.projector(self.backbone(batch[0].flatten(0, 1))).view(-1, 2, 6)
        return predicted(self, z[:, 0], z[:, 1])

    parts = {"backbone": vit(), "projector": nn.Linear(16, 6), "predictor": nn.Linear(6, 6)}
    return Built(stranger(parts, step, adam=True), data.stacked())


def hf_vit() -> Built:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=16,
        patch_size=4,
    )

    def step(self: Any, batch: Any) -> Tensor:
        found = [self.backbone(pixel_values=x).last_hidden_state[:, 0] for x in batch[0]]
        return predicted(self, *(self.projector(features) for features in found))

    parts = {"backbone": ViTModel(config), "projector": nn.Linear(16, 6), "predictor": nn.Linear(6, 6)}
    return Built(stranger(parts, step, adam=True), data.pairs())


def simcse(dropout: float = 0.1) -> Built:
    """The same sentence twice, one after the other; dropout makes the views."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )

    def step(self: Any, batch: Any) -> Tensor:
        ids, mask = (batch[key][:, None].expand(-1, 2, -1).flatten(0, 1) for key in ("input_ids", "attention_mask"))
        found = self.backbone(input_ids=ids, attention_mask=mask)
        z = self.projector(found.last_hidden_state[:, 0])
        return predicted(self, z[0::2], z[1::2])

    parts = {"backbone": BertModel(config), "projector": nn.Linear(16, 6), "predictor": nn.Linear(6, 6)}
    return Built(stranger(parts, step, adam=True), data.sentences())


def bert_calls() -> Built:
    """Two calls on the same tokens with their masks."""
    built = simcse()

    def step(self: Any, batch: Any) -> Tensor:
        z = []
        for _ in range(2):
            found = self.backbone(batch["input_ids"], batch["attention_mask"])
            z.append(self.projector(found.pooler_output))
        return predicted(self, *z)

    parts = {name: built.module.get_submodule(name) for name in ("backbone", "projector", "predictor")}
    return Built(stranger(parts, step, adam=True), built.train)


def _sized(size: int, encoder: str = "backbone", **kwargs: Any) -> Probed:
    clean = (data.labelled(24, (3, size, size), seed=5), data.labelled(16, (3, size, size), seed=6))
    kwargs.setdefault("rows", lambda module, batch: module.get_submodule(encoder)(batch[0]))
    return Probed(encoder, *clean, **kwargs)


def _tokens(module: Any, batch: Any) -> Tensor:
    return module.backbone(batch["input_ids"], batch["attention_mask"]).last_hidden_state.mean(1)


def _operator(*layers: str, **kwargs: Any) -> Operator:
    return Operator("backbone", "projector", (*layers, "projector"), **kwargs)


_TIMM: dict[str, Any] = {"needs": ["timm"], "predictor": "predictor"}
_HF: dict[str, Any] = {"needs": ["transformers"], "predictor": "predictor"}
_WORDS = (data.sentences(24, seed=5), data.sentences(16, seed=6))

BACKBONES = [
    Case(
        "timm_vit",
        lambda: around(vit(), 16),
        operator=_operator("backbone.blocks.0.mlp.fc1"),
        probed=_sized(16),
        ranks=True,
        **_TIMM,
    ),
    Case(
        "timm_vit_pl",
        lambda: around(vit(), 16, package=PYTORCH_LIGHTNING),
        operator=_operator("backbone.blocks.0.mlp.fc1"),
        probed=_sized(16),
        package=PYTORCH_LIGHTNING,
        **{**_TIMM, "needs": ["timm", "pytorch_lightning"]},
    ),
    Case(
        "timm_vit_tokens",
        lambda: around(vit(), 16),
        "backbone.norm",
        "NLC",
        declared={"layout": "NLC"},
        bare="either",
        probed=_sized(
            16,
            features="backbone.norm",
            declared={"layout": "NLC"},
            rows=lambda m, b: m.backbone.forward_features(b[0]).mean(1),
        ),
        ranks=True,
        **_TIMM,
    ),
    Case(
        "timm_vit_class_token",
        lambda: around(vit(), 16),
        "backbone.norm",
        lambda x: x[:, 0],
        declared={"layout": lambda x: x[:, 0]},
        bare="skip",
        **_TIMM,
    ),
    Case(
        "timm_vit_checkpointed",
        lambda: around(checkpointed_vit(), 16),
        operator=_operator("backbone.blocks.0.mlp.fc1"),
        probed=_sized(16),
        **_TIMM,
    ),
    Case(
        "timm_vit_checkpointed_block",
        lambda: around(checkpointed_vit(), 16),
        "backbone.blocks.1",
        "NLC",
        counts=lambda calls: calls[:2],
        declared={"layout": "NLC"},
        value=False,
        bare="either",
        **_TIMM,
    ),
    Case(
        "timm_vit_interleaved",
        interleaved_vit,
        "backbone",
        views=lambda rows: interleaved(rows[0]),
        declared={"pairing": "interleaved", "views": 2},
        bare="either",
        operator=_operator("backbone.blocks.1.mlp.fc1", declared={"pairing": "interleaved", "views": 2}),
        ranks=True,
        **_TIMM,
    ),
    Case(
        "timm_swin",
        lambda: around(swin(), 16, 32),
        "backbone.norm",
        "NHWC",
        declared={"layout": "NHWC"},
        bare="either",
        operator=_operator("backbone.layers.0.blocks.0.mlp.fc1"),
        probed=_sized(
            32,
            features="backbone.norm",
            declared={"layout": "NHWC"},
            rows=lambda m, b: m.backbone.forward_features(b[0]).mean((1, 2)),
        ),
        ranks=True,
        **_TIMM,
    ),
    Case(
        "timm_convnext",
        lambda: around(convnext(), 16, 32),
        operator=_operator("backbone.stages.3.downsample.1", "backbone.stem.0"),
        probed=_sized(32),
        ranks=True,
        **_TIMM,
    ),
    Case(
        "timm_convnext_map",
        lambda: around(convnext(), 16, 32),
        "backbone.stages.1",
        "NCHW",
        declared={"layout": "NCHW"},
        bare="either",
        **_TIMM,
    ),
    Case(
        "timm_resnet",
        lambda: around(_timm("test_resnet"), 96, 32),
        operator=_operator("backbone.conv1.0"),
        probed=_sized(32, features="backbone.global_pool"),
        **_TIMM,
    ),
    Case(
        "hf_vit",
        hf_vit,
        "backbone",
        "NLC",
        declared={"layout": "NLC"},
        bare="either",
        operator=_operator("backbone.layers.0.mlp.fc1"),
        probed=_sized(16, declared={"layout": "NLC"}, rows=lambda m, b: m.backbone(b[0]).last_hidden_state.mean(1)),
        ranks=True,
        **_HF,
    ),
    Case(
        "hf_bert_simcse",
        simcse,
        views=lambda rows: interleaved(rows[0]),
        declared={"pairing": "interleaved", "views": 2},
        bare="either",
        operator=_operator(
            "backbone.encoder.layer.0.intermediate.dense", declared={"pairing": "interleaved", "views": 2}
        ),
        probed=Probed("backbone", *_WORDS, rows=_tokens, declared={"layout": "NLC"}, value=False),
        **_HF,
    ),
    Case(
        "hf_bert_calls",
        bert_calls,
        operator=_operator("backbone.encoder.layer.0.intermediate.dense", "backbone.pooler.dense"),
        **_HF,
    ),
    Case(
        "hf_bert_tokens",
        bert_calls,
        "backbone",
        "NLC",
        declared={"layout": "NLC"},
        bare="either",
        **_HF,
    ),
]

CASES = [*TORCHGEO, *BACKBONES]

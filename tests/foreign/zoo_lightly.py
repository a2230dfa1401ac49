"""Methods put together from lightly's own parts as its documentation does, on both of Lightning's packages."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import torch
from torch import Tensor, nn

from tests.foreign import data
from tests.foreign.case import LIGHTNING, PYTORCH_LIGHTNING, Built, Case, Operator, Probed
from tests.foreign.zoo_plain import CLEAN


def resnet_like(norm: bool = True) -> nn.Sequential:
    """Ends in [N, 8, 1, 1], like a torchvision ResNet without its classifier."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(6) if norm else nn.Identity(),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 8, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
    )


def _sgd(self: Any) -> Any:
    return torch.optim.SGD(self.parameters(), lr=0.06)


def simclr(package: str, online: bool = False) -> Built:
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead

    L = importlib.import_module(package)

    class SimCLR(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = resnet_like()
            self.projection_head = SimCLRProjectionHead(8, 8, 6)
            self.criterion = NTXentLoss()
            if online:
                from lightly.utils.benchmarking import OnlineLinearClassifier

                self.online_classifier = OnlineLinearClassifier(8, 4, (1,))

        def forward(self, x: Tensor) -> Tensor:
            return self.backbone(x).flatten(start_dim=1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            views, targets = batch[0], batch[1]
            features = self.forward(torch.cat(views))
            z0, z1 = self.projection_head(features).chunk(len(views))
            loss = self.criterion(z0, z1)
            if online:
                cls_loss, _ = self.online_classifier.training_step((features.detach(), targets.repeat(2)), batch_idx)
                loss = loss + cls_loss
            self.log("train_loss", loss, batch_size=len(targets))
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.projection_head(self.forward(batch[0]))

        configure_optimizers = _sgd

    return Built(SimCLR(), data.pairs(), data.labelled(12, seed=3))


def siamese(package: str, method: str) -> Built:
    """Two calls of backbone and head: SimCLR's older example, Barlow Twins, VICReg."""
    from lightly.loss import BarlowTwinsLoss, NTXentLoss, VICRegLoss
    from lightly.models.modules.heads import BarlowTwinsProjectionHead, SimCLRProjectionHead, VICRegProjectionHead

    L = importlib.import_module(package)
    head, loss = {
        "simclr": (SimCLRProjectionHead, NTXentLoss),
        "barlow": (BarlowTwinsProjectionHead, BarlowTwinsLoss),
        "vicreg": (VICRegProjectionHead, VICRegLoss),
    }[method]

    class Siamese(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = resnet_like()
            self.projection_head = head(8, 8, 6)
            self.criterion = loss()

        def forward(self, x: Tensor) -> Tensor:
            return self.projection_head(self.backbone(x).flatten(start_dim=1))

        def training_step(self, batch: Any, batch_index: int) -> Tensor:
            x0, x1 = batch[0]
            return self.criterion(self.forward(x0), self.forward(x1))

        configure_optimizers = _sgd

    return Built(Siamese(), data.pairs())


def byol(package: str) -> Built:
    from lightly.loss import NegativeCosineSimilarity
    from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
    from lightly.models.utils import deactivate_requires_grad, update_momentum

    L = importlib.import_module(package)

    class BYOL(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = resnet_like()
            self.projection_head = BYOLProjectionHead(8, 8, 6)
            self.prediction_head = BYOLPredictionHead(6, 8, 6)
            self.backbone_momentum = copy.deepcopy(self.backbone)
            self.projection_head_momentum = copy.deepcopy(self.projection_head)
            deactivate_requires_grad(self.backbone_momentum)
            deactivate_requires_grad(self.projection_head_momentum)
            self.criterion = NegativeCosineSimilarity()

        def forward(self, x: Tensor) -> Tensor:
            y = self.backbone(x).flatten(start_dim=1)
            return self.prediction_head(self.projection_head(y))

        def forward_momentum(self, x: Tensor) -> Tensor:
            y = self.backbone_momentum(x).flatten(start_dim=1)
            return self.projection_head_momentum(y).detach()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            update_momentum(self.backbone, self.backbone_momentum, m=0.99)
            update_momentum(self.projection_head, self.projection_head_momentum, m=0.99)
            x0, x1 = batch[0]
            p0, z0 = self.forward(x0), self.forward_momentum(x0)
            p1, z1 = self.forward(x1), self.forward_momentum(x1)
            return 0.5 * (self.criterion(p0, z1) + self.criterion(p1, z0))

        configure_optimizers = _sgd

    return Built(BYOL(), data.pairs())


def simsiam(package: str, neighbours: bool = False) -> Built:
    """SimSiam; with `neighbours` NNCLR, whose targets come out of a memory bank."""
    from lightly.loss import NegativeCosineSimilarity, NTXentLoss
    from lightly.models.modules import NNMemoryBankModule, SimSiamPredictionHead, SimSiamProjectionHead

    L = importlib.import_module(package)

    class SimSiam(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = resnet_like()
            self.projection_head = SimSiamProjectionHead(8, 8, 6)
            self.prediction_head = SimSiamPredictionHead(6, 4, 6)
            self.criterion = NTXentLoss() if neighbours else NegativeCosineSimilarity()
            if neighbours:
                self.memory_bank = NNMemoryBankModule(size=(48, 6))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            z = self.projection_head(self.backbone(x).flatten(start_dim=1))
            return z.detach(), self.prediction_head(z)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x0, x1 = batch[0]
            z0, p0 = self.forward(x0)
            z1, p1 = self.forward(x1)
            if neighbours:
                z0 = self.memory_bank(z0, update=False)
                z1 = self.memory_bank(z1, update=True)
            return 0.5 * (self.criterion(z0, p1) + self.criterion(z1, p0))

        configure_optimizers = _sgd

    return Built(SimSiam(), data.pairs())


def moco(package: str, shuffled: bool = False) -> Built:
    """Keys from the momentum encoder and a queue; with `shuffled` the keys' batch goes through in another order."""
    from lightly.loss import NTXentLoss
    from lightly.models.modules import MoCoProjectionHead
    from lightly.models.utils import deactivate_requires_grad, update_momentum

    L = importlib.import_module(package)

    class MoCo(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = resnet_like(norm=False)
            self.projection_head = MoCoProjectionHead(8, 8, 6)
            self.backbone_momentum = copy.deepcopy(self.backbone)
            self.projection_head_momentum = copy.deepcopy(self.projection_head)
            deactivate_requires_grad(self.backbone_momentum)
            deactivate_requires_grad(self.projection_head_momentum)
            self.criterion = NTXentLoss(memory_bank_size=(48, 6))

        def forward(self, x: Tensor) -> Tensor:
            return self.projection_head(self.backbone(x).flatten(start_dim=1))

        def forward_momentum(self, x: Tensor) -> Tensor:
            key = self.backbone_momentum(x.flip(0) if shuffled else x).flatten(start_dim=1)
            key = self.projection_head_momentum(key).detach()
            return key.flip(0) if shuffled else key

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            update_momentum(self.backbone, self.backbone_momentum, m=0.99)
            update_momentum(self.projection_head, self.projection_head_momentum, m=0.99)
            x_query, x_key = batch[0]
            query = self.forward(x_query)
            with torch.no_grad():
                key = self.forward_momentum(x_key)
            return self.criterion(query, key)

        configure_optimizers = _sgd

    return Built(MoCo(), data.pairs())


def tico(package: str) -> Built:
    from lightly.loss import TiCoLoss
    from lightly.models.modules.heads import TiCoProjectionHead
    from lightly.models.utils import update_momentum

    L = importlib.import_module(package)

    class TiCo(L.LightningModule):
        """The teacher is called `backbone`, as in lightly's benchmarks."""

        def __init__(self) -> None:
            super().__init__()
            self.backbone = resnet_like()
            self.projection_head = TiCoProjectionHead(8, 8, 6)
            self.student_backbone = copy.deepcopy(self.backbone)
            self.student_projection_head = copy.deepcopy(self.projection_head)
            self.criterion = TiCoLoss()

        def forward(self, x: Tensor) -> Tensor:
            return self.backbone(x)

        @torch.no_grad()
        def forward_teacher(self, x: Tensor) -> Tensor:
            return self.projection_head(self(x).flatten(start_dim=1))

        def forward_student(self, x: Tensor) -> Tensor:
            return self.student_projection_head(self.student_backbone(x).flatten(start_dim=1))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            update_momentum(self.student_backbone, self.backbone, m=0.99)
            update_momentum(self.student_projection_head, self.projection_head, m=0.99)
            views = batch[0]
            return self.criterion(self.forward_teacher(views[0]), self.forward_student(views[1]))

        def configure_optimizers(self) -> Any:
            student = [*self.student_backbone.parameters(), *self.student_projection_head.parameters()]
            return torch.optim.SGD(student, lr=0.06)

    return Built(TiCo(), data.pairs())


def swav(package: str) -> Built:
    from lightly.loss import SwaVLoss
    from lightly.models.modules import SwaVProjectionHead, SwaVPrototypes

    L = importlib.import_module(package)

    class SwaV(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = resnet_like()
            self.projection_head = SwaVProjectionHead(8, 8, 6)
            self.prototypes = SwaVPrototypes(6, 10, 1)
            self.criterion = SwaVLoss()

        def forward(self, x: Tensor) -> Tensor:
            x = self.projection_head(self.backbone(x).flatten(start_dim=1))
            return self.prototypes(nn.functional.normalize(x, dim=1, p=2), self.current_epoch)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.prototypes.normalize()
            crops = [self.forward(x) for x in batch[0]]
            return self.criterion(crops[:2], crops[2:])

        configure_optimizers = _sgd

    return Built(SwaV(), data.multi_crops())


def dino(package: str, width: int = 12, crops: bool = True) -> Built:
    """Multi-crop: one call on all large crops, one on all small ones, of the student; a teacher beside it."""
    from lightly.loss import DINOLoss
    from lightly.models.modules import DINOProjectionHead
    from lightly.models.utils import activate_requires_grad, deactivate_requires_grad, update_momentum

    L = importlib.import_module(package)

    class DINO(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = resnet_like()
            self.projection_head = DINOProjectionHead(8, 8, 6, width, freeze_last_layer=1)
            self.student_backbone = copy.deepcopy(self.backbone)
            # Not a copy: a module under weight_norm cannot be copied once it was called.
            self.student_projection_head = DINOProjectionHead(8, 8, 6, width, freeze_last_layer=1)
            self.student_projection_head.load_state_dict(self.projection_head.state_dict())
            self.criterion = DINOLoss(output_dim=width)

        def forward(self, x: Tensor) -> Tensor:
            return self.backbone(x)

        def forward_student(self, x: Tensor) -> Tensor:
            return self.student_projection_head(self.student_backbone(x).flatten(start_dim=1))

        def on_train_start(self) -> None:
            deactivate_requires_grad(self.backbone)
            deactivate_requires_grad(self.projection_head)

        def on_train_end(self) -> None:
            activate_requires_grad(self.backbone)
            activate_requires_grad(self.projection_head)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            views = batch[0]
            large = torch.cat(views[:2])
            teacher = self.projection_head(self.forward(large).flatten(start_dim=1))
            student = [self.forward_student(large)]
            if crops:
                student.append(self.forward_student(torch.cat(views[2:])))
            update_momentum(self.student_backbone, self.backbone, m=0.99)
            update_momentum(self.student_projection_head, self.projection_head, m=0.99)
            return self.criterion(teacher.chunk(2), torch.cat(student).chunk(len(views)), epoch=self.current_epoch)

        def configure_optimizers(self) -> Any:
            student = [*self.student_backbone.parameters(), *self.student_projection_head.parameters()]
            return torch.optim.SGD(student, lr=0.01)

    return Built(DINO(), data.multi_crops() if crops else data.pairs(24))


def mae(package: str) -> Built:
    from lightly.models import utils
    from lightly.models.modules import MAEDecoderTIMM, MaskedVisionTransformerTIMM
    from timm.models.vision_transformer import VisionTransformer

    L = importlib.import_module(package)

    class MAE(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            vit = VisionTransformer(16, 4, embed_dim=16, depth=2, num_heads=2, mlp_ratio=1, num_classes=0)
            self.patch_size = 4
            self.backbone = MaskedVisionTransformerTIMM(vit=vit)
            self.sequence_length = self.backbone.sequence_length
            self.decoder = MAEDecoderTIMM(
                num_patches=16, patch_size=4, embed_dim=16, decoder_embed_dim=8, decoder_depth=1, decoder_num_heads=2
            )
            self.criterion = nn.MSELoss()

        def forward(self, x: Tensor) -> Tensor:
            return self.backbone(x)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            images = batch[0][0]
            n = len(images)
            keep, mask = utils.random_token_mask((n, self.sequence_length), mask_ratio=0.5, device=images.device)
            encoded = self.backbone.encode(images=images, idx_keep=keep)
            decoded = self.decoder.embed(encoded)
            masked = utils.repeat_token(self.decoder.mask_token, (n, self.sequence_length))
            masked = utils.set_at_index(masked, keep, decoded.type_as(masked))
            predicted = self.decoder.predict(utils.get_at_index(self.decoder.decode(masked), mask))
            target = utils.get_at_index(utils.patchify(images, self.patch_size), mask - 1)
            return self.criterion(predicted, target)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.forward(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1.5e-4)

    return Built(MAE(), data.pairs(views=1), data.labelled(12, seed=3))


def benchmark_module() -> Built:
    """lightly's own BenchmarkModule: it embeds its kNN bank itself when validation begins."""
    from lightly.loss import NegativeCosineSimilarity
    from lightly.models.modules import SimSiamPredictionHead, SimSiamProjectionHead
    from lightly.utils.benchmarking import BenchmarkModule

    class SimSiamModel(BenchmarkModule):
        def __init__(self, dataloader_kNN: Any, num_classes: int) -> None:
            super().__init__(dataloader_kNN, num_classes, knn_k=5)
            self.backbone = resnet_like()
            self.projection_head = SimSiamProjectionHead(8, 8, 6)
            self.prediction_head = SimSiamPredictionHead(6, 4, 6)
            self.criterion = NegativeCosineSimilarity()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            z = self.projection_head(self.backbone(x).flatten(start_dim=1))
            return z.detach(), self.prediction_head(z)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            (x0, x1), _, _ = batch
            z0, p0 = self.forward(x0)
            z1, p1 = self.forward(x1)
            return 0.5 * (self.criterion(z0, p1) + self.criterion(z1, p0))

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=6e-2, momentum=0.9)]

    def named(items: data.Items) -> data.Items:
        return data.Items([(x, y, "name") for x, y in items.items])

    bank, held_out = named(data.labelled(24, seed=5)), named(data.labelled(12, seed=3))
    return Built(SimSiamModel(data.loader(bank), 4), data.pairs(), held_out)


def embedding() -> Built:
    """lightly's own SelfSupervisedEmbedding around a model of both views."""
    from lightly.embedding import SelfSupervisedEmbedding
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.projection_head = resnet_like(), SimCLRProjectionHead(8, 8, 6)

        def forward(self, x0: Tensor, x1: Tensor) -> tuple[Tensor, Tensor]:
            z0, z1 = (self.projection_head(self.backbone(x).flatten(start_dim=1)) for x in (x0, x1))
            return z0, z1

    model = Model()
    items = data.pairs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.06)
    return Built(SelfSupervisedEmbedding(model, NTXentLoss(), optimizer, data.loader(items)), items)


def _rows(module: Any, batch: Any) -> Tensor:
    return module.backbone(batch[0]).flatten(1)


def _operator(output: str = "projection_head", layers: tuple[str, ...] = (), **kwargs: Any) -> Operator:
    return Operator("backbone", output, layers or ("backbone.0", "projection_head.layers.0"), **kwargs)


def _cases(package: str) -> list[Case]:
    end = "" if package == LIGHTNING else "_pl"
    common: dict[str, Any] = {"package": package, "needs": ["lightly", package.partition(".")[0]]}
    probed = Probed("backbone", *CLEAN, rows=_rows)
    head = "projection_head"
    blocks = {"pairing": "blocked", "views": 2, "held_out": {"views": 1}}
    crops = {"pairing": lambda calls: [*calls[0].chunk(2), *calls[1].chunk(3)]}
    return [
        Case(
            f"lightly_simclr{end}",
            lambda: simclr(package, online=True),
            head,
            views=lambda rows: list(rows[0].chunk(2)),
            declared=blocks,
            bare="either",
            operator=_operator(declared={"pairing": "blocked", "views": 2}),
            probed=probed,
            held_out=lambda rows: rows,
            **common,
        ),
        Case(f"lightly_simclr_calls{end}", lambda: siamese(package, "simclr"), head, operator=_operator(), **common),
        Case(
            f"lightly_barlow_twins{end}",
            lambda: siamese(package, "barlow"),
            head,
            operator=_operator(),
            probed=probed,
            **common,
        ),
        Case(f"lightly_vicreg{end}", lambda: siamese(package, "vicreg"), head, operator=_operator(), **common),
        Case(
            f"lightly_backbone_map{end}",
            lambda: siamese(package, "barlow"),
            "backbone",
            "NCHW",
            declared={"layout": "NCHW"},
            bare="value",
            **common,
        ),
        Case(
            f"lightly_byol{end}",
            lambda: byol(package),
            head,
            predictor="prediction_head",
            operator=_operator(),
            probed=probed,
            **common,
        ),
        Case(
            f"lightly_simsiam{end}",
            lambda: simsiam(package),
            head,
            predictor="prediction_head",
            operator=_operator("prediction_head", ("backbone.0", "prediction_head.layers.0"), value=False),
            probed=probed,
            **common,
        ),
        Case(
            f"lightly_nnclr{end}",
            lambda: simsiam(package, neighbours=True),
            head,
            predictor="prediction_head",
            operator=_operator(),
            **common,
        ),
        Case(
            f"lightly_moco{end}",
            lambda: moco(package),
            head,
            target="projection_head_momentum",
            declared={"target": "projection_head_momentum"},
            operator=_operator(
                declared={"target": "backbone_momentum"},
                again=lambda twin, batch: [twin(x) for x in batch[0]],
            ),
            probed=probed,
            **common,
        ),
        Case(
            f"lightly_moco_shuffled{end}",
            lambda: moco(package, shuffled=True),
            head,
            target="projection_head_momentum",
            views=lambda rows: [rows[0], *(row.flip(0) for row in rows[1:])],
            declared={"target": "projection_head_momentum"},
            value=False,
            **common,
        ),
        Case(
            f"lightly_tico{end}",
            lambda: tico(package),
            "student_projection_head",
            target="projection_head",
            declared={"target": "projection_head"},
            probed=probed,
            **common,
        ),
        Case(
            f"lightly_swav{end}",
            lambda: swav(package),
            head,
            operator=_operator(views=lambda rows: rows[:2]),
            probed=probed,
            **common,
        ),
        Case(
            f"lightly_dino{end}",
            lambda: dino(package),
            "student_projection_head",
            views=lambda rows: [*rows[0].chunk(2), *rows[1].chunk(3)],
            declared=crops,
            bare="either",
            operator=Operator(
                "student_backbone",
                "student_projection_head",
                ("student_backbone.0", "student_projection_head.layers.0"),
                views=lambda rows: list(rows[0].chunk(2)),
                value=False,
            ),
            probed=probed,
            **common,
        ),
        Case(
            f"lightly_mae{end}",
            lambda: mae(package),
            "backbone.vit.norm",
            "NLC",
            declared={"layout": "NLC", "held_out": False},
            bare_features="backbone",
            bare="either",
            says="backbone.vit",
            probed=Probed("backbone", *CLEAN, rows=lambda module, batch: module.backbone(batch[0])),
            **{**common, "needs": [*common["needs"], "timm"]},
        ),
    ]


CASES = [
    *_cases(LIGHTNING),
    *_cases(PYTORCH_LIGHTNING),
    Case(
        "lightly_dino_wide",
        lambda: dino(LIGHTNING, 65536, crops=False),
        "student_projection_head",
        views=lambda rows: list(rows[0].chunk(2)),
        declared={"pairing": "blocked", "views": 2},
        bare="either",
        needs=["lightly"],
        batch=8,
    ),
    Case(
        "lightly_benchmark_module",
        benchmark_module,
        "backbone",
        "NCHW",
        declared={"layout": "NCHW"},
        predictor="prediction_head",
        operator=_operator(),
        probed=Probed("backbone", *CLEAN, rows=_rows),
        held_out=lambda rows: rows,
        package=PYTORCH_LIGHTNING,
        needs=["lightly", "pytorch_lightning"],
    ),
    Case(
        "lightly_embedding",
        embedding,
        "model.projection_head",
        operator=Operator("model.backbone", "model.projection_head", ("model.backbone.0",)),
        package=PYTORCH_LIGHTNING,
        needs=["lightly", "pytorch_lightning", "omegaconf"],
    ),
]

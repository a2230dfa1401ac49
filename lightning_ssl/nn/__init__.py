"""Backbones, heads, batch-norm parts, target network and predictor actions: what the methods are built from."""

from lightning_ssl.distributed import gather_rows, rank_weight
from lightning_ssl.nn.backbones import LinearBackbone, MLPBackbone, SmallConv, build_backbone, num_features
from lightning_ssl.nn.gradients import add_gradient_noise_, mix_weights_, tangential
from lightning_ssl.nn.heads import HeadInit, build_predictor, init_head_, mlp
from lightning_ssl.nn.norm import BatchNormParts, build_norm
from lightning_ssl.nn.optim import LARS, warmup_cosine
from lightning_ssl.nn.partitioned import PartitionedLinear
from lightning_ssl.nn.predictor_actions import (
    DirectPredictorUpdate,
    PredictorInit,
    reset_parameters_,
    symmetrize_,
    symmetrize_two_layers_,
)
from lightning_ssl.nn.target import TargetNetwork, ema_momentum

__all__ = [
    "LARS",
    "BatchNormParts",
    "DirectPredictorUpdate",
    "HeadInit",
    "LinearBackbone",
    "MLPBackbone",
    "PartitionedLinear",
    "PredictorInit",
    "SmallConv",
    "TargetNetwork",
    "add_gradient_noise_",
    "build_backbone",
    "build_norm",
    "build_predictor",
    "ema_momentum",
    "gather_rows",
    "init_head_",
    "mix_weights_",
    "mlp",
    "num_features",
    "rank_weight",
    "reset_parameters_",
    "symmetrize_",
    "symmetrize_two_layers_",
    "tangential",
    "warmup_cosine",
]

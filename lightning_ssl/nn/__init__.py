"""Backbones, heads, batch-norm parts, target network and predictor actions: what the methods are built from."""

from lightning_ssl.distributed import gather_rows, rank_weight
from lightning_ssl.nn.backbones import LinearBackbone, MLPBackbone, SmallConv, build_backbone, num_features
from lightning_ssl.nn.gradients import add_gradient_noise_, mix_weights_, tangential
from lightning_ssl.nn.heads import build_predictor, mlp
from lightning_ssl.nn.norm import BatchNormParts, build_norm
from lightning_ssl.nn.optim import LARS, warmup_cosine
from lightning_ssl.nn.predictor_actions import DirectPredictorUpdate, reset_parameters_, symmetrize_
from lightning_ssl.nn.target import TargetNetwork, ema_momentum

__all__ = [
    "LARS",
    "BatchNormParts",
    "DirectPredictorUpdate",
    "LinearBackbone",
    "MLPBackbone",
    "SmallConv",
    "TargetNetwork",
    "add_gradient_noise_",
    "build_backbone",
    "build_norm",
    "build_predictor",
    "ema_momentum",
    "gather_rows",
    "mix_weights_",
    "mlp",
    "num_features",
    "rank_weight",
    "reset_parameters_",
    "symmetrize_",
    "tangential",
    "warmup_cosine",
]

"""The torchmetrics twins: states are sums or rows, the maths is `functional`'s."""

from lightning_ssl.metrics.covariance_operator import CovarianceOperator
from lightning_ssl.metrics.geometry import Alignment, EffectiveRank, Uniformity
from lightning_ssl.metrics.knn import KNNAccuracy, LinearProbeAccuracy
from lightning_ssl.metrics.moments import CorrelationBound, SecondMoment
from lightning_ssl.metrics.predictor import EigenspaceAlignment
from lightning_ssl.metrics.quality import FeatureQuality, PrototypeUse

__all__ = [
    "Alignment",
    "CorrelationBound",
    "CovarianceOperator",
    "EffectiveRank",
    "EigenspaceAlignment",
    "FeatureQuality",
    "KNNAccuracy",
    "LinearProbeAccuracy",
    "PrototypeUse",
    "SecondMoment",
    "Uniformity",
]

"""Drop-in callbacks: what a self-supervised run learns, and why, at any number of ranks."""

from lightning_ssl.callbacks.collapse_monitor import CollapseMonitor
from lightning_ssl.callbacks.correlation_bound import CorrelationBound
from lightning_ssl.callbacks.covariance_operator_norm import CovarianceOperatorNorm
from lightning_ssl.callbacks.diagnostic import Diagnostic
from lightning_ssl.callbacks.direct_predictor import DirectPredictor
from lightning_ssl.callbacks.effective_rank import EffectiveRank
from lightning_ssl.callbacks.eigenspace_alignment import EigenspaceAlignment
from lightning_ssl.callbacks.feature_quality import FeatureQuality, PrototypeUse, TargetLag
from lightning_ssl.callbacks.knn_probe import KNNProbe
from lightning_ssl.callbacks.linear_probe import LinearProbe
from lightning_ssl.callbacks.predictor_reset import PredictorReset
from lightning_ssl.callbacks.probe import Probe
from lightning_ssl.callbacks.representation_circle import RepresentationCircle
from lightning_ssl.callbacks.run_report import RunReport
from lightning_ssl.callbacks.symmetric_predictor import SymmetricPredictor
from lightning_ssl.callbacks.uniformity_alignment import UniformityAlignment
from lightning_ssl.callbacks.verdict import Evidence, Forecast, PlaceVerdict, Turn, Verdict
from lightning_ssl.callbacks.wandb_setup import WandbSetup
from lightning_ssl.callbacks.watcher import Watcher
from lightning_ssl.quantities import Quantity

__all__ = [
    "CollapseMonitor",
    "CorrelationBound",
    "CovarianceOperatorNorm",
    "Diagnostic",
    "DirectPredictor",
    "EffectiveRank",
    "EigenspaceAlignment",
    "Evidence",
    "FeatureQuality",
    "Forecast",
    "KNNProbe",
    "LinearProbe",
    "PlaceVerdict",
    "PredictorReset",
    "Probe",
    "PrototypeUse",
    "Quantity",
    "RepresentationCircle",
    "RunReport",
    "SymmetricPredictor",
    "TargetLag",
    "Turn",
    "UniformityAlignment",
    "Verdict",
    "WandbSetup",
    "Watcher",
]

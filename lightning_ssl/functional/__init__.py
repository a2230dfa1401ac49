"""The papers' quantities as pure functions: tensors in, tensors out."""

from lightning_ssl.functional.covariance_operator import covariance_operator, covariance_operator_norms
from lightning_ssl.functional.geometry import alignment, effective_rank, principal_plane, uniformity
from lightning_ssl.functional.losses import (
    barlow_twins_loss,
    byol_loss,
    cross_model_loss,
    exact_contrastive_loss,
    info_nce_loss,
    pair_weight,
    simple_contrastive_loss,
    soft_triplet_loss,
    squared_distance,
)
from lightning_ssl.functional.moments import (
    correlation_loss,
    correlation_matrix,
    error_rate_bound,
    error_rate_bound_as_printed,
    generalization_bound,
    second_moment,
)
from lightning_ssl.functional.predictor import (
    asymmetry,
    balance_residual,
    commutator_norm,
    direct_predictor,
    effective_predictor,
    eigenspace_alignment,
    optimal_predictor,
    predictor_values,
)
from lightning_ssl.functional.probes import fit_linear_probe, knn_predict
from lightning_ssl.functional.span import predictor_values_of_rows
from lightning_ssl.functional.spread import spread

__all__ = [
    "alignment",
    "asymmetry",
    "balance_residual",
    "barlow_twins_loss",
    "byol_loss",
    "commutator_norm",
    "correlation_loss",
    "correlation_matrix",
    "covariance_operator",
    "covariance_operator_norms",
    "cross_model_loss",
    "direct_predictor",
    "effective_predictor",
    "effective_rank",
    "eigenspace_alignment",
    "error_rate_bound",
    "error_rate_bound_as_printed",
    "exact_contrastive_loss",
    "fit_linear_probe",
    "generalization_bound",
    "info_nce_loss",
    "knn_predict",
    "optimal_predictor",
    "pair_weight",
    "predictor_values",
    "predictor_values_of_rows",
    "principal_plane",
    "second_moment",
    "simple_contrastive_loss",
    "soft_triplet_loss",
    "spread",
    "squared_distance",
    "uniformity",
]

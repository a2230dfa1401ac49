"""The predictor against the features' second moment F: alignment of eigenspaces, and predictors set from F."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_ssl.functional.checks import check_rows, check_square
from lightning_ssl.functional.span import SMALL


class EigenspaceAlignmentResult(NamedTuple):
    """What :func:`eigenspace_alignment` returns; each field is a vector [d], ordered by falling eigenvalue."""

    eigenvalues: Tensor
    predictor_values: Tensor
    cosines: Tensor


def eigenspace_alignment(F: Tensor, W: Tensor) -> EigenspaceAlignmentResult:
    r"""How well the eigenvectors of F are eigenvectors of the predictor W (DirectPred Sec. 3, Theorem 3).

    With :math:`F u_j = s_j u_j`: the eigenvalues :math:`s_j`, the predictor's :math:`p_j = u_j^T W u_j`, and
    :math:`\cos(u_j, W u_j)`, which is 1 for every j when the eigenspaces agree and W is positive on them.

    Args:
        F: The second moment of the predictor's inputs, symmetric ``[d, d]``.
        W: The predictor, ``[d, d]``.

    Example:
        >>> result = eigenspace_alignment(torch.diag(torch.tensor([1.0, 4.0])), torch.diag(torch.tensor([2.0, 3.0])))
        >>> result.eigenvalues, result.predictor_values, result.cosines
        (tensor([4., 1.]), tensor([3., 2.]), tensor([1., 1.]))
    """
    F, W = _pair(F, W)
    values, vectors = _descending_eigenbasis(F)
    images = W @ vectors  # column j is W u_j
    predictor_values = (vectors * images).sum(dim=0)
    norms = images.norm(dim=0)
    cosines = predictor_values / norms.clamp_min(torch.finfo(norms.dtype).tiny)
    return EigenspaceAlignmentResult(values, predictor_values, cosines)


def predictor_values(F: Tensor, W: Tensor) -> dict[str, Tensor]:
    """All that is said of a predictor W and the second moment F of its inputs, by name.

    The fields of :func:`eigenspace_alignment`, the mean of the cosines (``cosine_mean``) and their mean weighted by
    the eigenvalues (``cosine_weighted``), :func:`commutator_norm`, :func:`asymmetry`, and the smallest eigenvalue of
    W's symmetric part (``smallest_symmetric_value``).

    Args:
        F: The second moment of the predictor's inputs, symmetric ``[d, d]``.
        W: The predictor, ``[d, d]``.

    Example:
        >>> float(predictor_values(torch.eye(2), 3 * torch.eye(2))["cosine_weighted"])
        1.0
    """
    found = eigenspace_alignment(F, W)
    s = found.eigenvalues.clamp_min(0)
    return {
        **found._asdict(),
        "cosine_mean": found.cosines.mean(),
        "cosine_weighted": (found.cosines * s).sum() / s.sum().clamp_min(torch.finfo(s.dtype).tiny),
        "commutator_norm": commutator_norm(F, W),
        "asymmetry": asymmetry(W),
        "smallest_symmetric_value": torch.linalg.eigvalsh((W + W.T) / 2)[0],
    }


def commutator_norm(F: Tensor, W: Tensor) -> Tensor:
    r"""The relative commutator :math:`\|FW - WF\|_F / (\|F\|_F \|W\|_F)` (DirectPred Sec. 3.1); 0 when they commute.

    Example:
        >>> commutator_norm(torch.diag(torch.tensor([1.0, 4.0])), torch.eye(2))
        tensor(0.)
    """
    F, W = _pair(F, W)
    scale = F.norm() * W.norm()
    return (F @ W - W @ F).norm() / scale.clamp_min(torch.finfo(scale.dtype).tiny)


def asymmetry(W: Tensor) -> Tensor:
    r"""How far a predictor is from symmetric, :math:`\|W - W^T\|_F / \|W\|_F`: 0 to 2.

    Example:
        >>> asymmetry(torch.tensor([[0.0, 1.0], [-1.0, 0.0]]))
        tensor(2.)
    """
    check_square(W, "W")
    norm = W.norm()
    return (W - W.T).norm() / norm.clamp_min(torch.finfo(norm.dtype).tiny)


def balance_residual(V: Tensor, W: Tensor, alpha_p: float = 1.0) -> Tensor:
    r"""How far predictor and layer before are from balanced (DirectPred Theorem 1); weight decay drives it to 0.

    .. math:: \|V V^T - W^T W / \alpha_p\|_F / \|V V^T\|_F

    Args:
        V: The weight of the linear layer before the predictor, ``[d, e]``.
        W: The predictor, ``[d, d]``.
        alpha_p: The predictor's learning rate relative to the rest.

    Example:
        >>> balance_residual(torch.eye(2), torch.eye(2))
        tensor(0.)
    """
    check_square(W, "W")
    if V.ndim != 2 or len(V) != len(W):
        raise ValueError(f"`V` must be [{len(W)}, e], the layer that feeds `W`, got shape {tuple(V.shape)}")
    if len(W) > SMALL:
        V, W = V.float(), W.float()
    # Both are symmetric: of the blocks off the diagonal half are enough.
    difference = size = W.new_zeros(())
    for first in range(0, len(W), SMALL):
        for second in range(first, len(W), SMALL):
            rows, columns = slice(first, first + SMALL), slice(second, second + SMALL)
            gram, times = V[rows] @ V[columns].T, 1 if first == second else 2
            block = gram - W[:, rows].T @ W[:, columns] / alpha_p
            difference = difference + times * block.square().sum()
            size = size + times * gram.square().sum()
    return difference.sqrt() / size.sqrt().clamp_min(torch.finfo(size.dtype).tiny)


def effective_predictor(inputs: Tensor, outputs: Tensor, bias: bool = False) -> Tensor:
    r"""The linear map nearest to what a predictor does, :math:`\arg\min_W \sum_i \|y_i - W x_i\|^2`.

    Gives any predictor, an MLP too, a matrix W. Directions in which the inputs do not vary get weight 0.

    Args:
        inputs: What entered the predictor, ``[N, d]``.
        outputs: What left it, ``[N, e]``.
        bias: Fit :math:`W x + b` instead, and return W.

    Returns:
        W, ``[e, d]``.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> effective_predictor(x, 2 * x)
        tensor([[2., 0.],
                [0., 2.]])
    """
    check_rows(inputs, "inputs")
    check_rows(outputs, "outputs")
    if len(inputs) != len(outputs):
        raise ValueError(f"`inputs` and `outputs` must have as many rows, got {len(inputs)} and {len(outputs)}")
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    x, y = _precise(inputs), _precise(outputs)
    if bias:
        x, y = x - x.mean(dim=0), y - y.mean(dim=0)
    return effective_predictor_of_moments(x.T @ x, y.T @ x).to(dtype)


def effective_predictor_of_moments(xx: Tensor, yx: Tensor) -> Tensor:
    """Least squares from the (sums or means of) products x x^T and y x^T."""
    return yx @ torch.linalg.pinv(xx, hermitian=True, rtol=1e-12 if xx.dtype == torch.float64 else 1e-6)


def direct_predictor(F: Tensor, eps: float = 0.1, shift: float = 0.0) -> Tensor:
    r"""The predictor set from F without gradients (DirectPred Eq. 18), in units of F's largest eigenvalue.

    :math:`W = \sum_j p_j u_j u_j^T` with :math:`F u_j = s_j u_j` and

    .. math:: p_j = \sqrt{\max(s_j / s_{max} - c, 0)} + \varepsilon

    which is :math:`\sqrt{s_j} + \varepsilon \max_k \sqrt{s_k}`, divided by :math:`\sqrt{s_{max}}`: the result does not
    depend on the scale of F, as with l2-normalised outputs only the ratios of the p_j matter.

    Args:
        F: The second moment of the predictor's inputs, symmetric positive semi-definite ``[d, d]``, not zero.
        eps: The boost of the small eigenvalues.
        shift: The constant c of Table 7.

    Example:
        >>> direct_predictor(torch.diag(torch.tensor([4.0, 1.0])), eps=0.1)
        tensor([[1.1000, 0.0000],
                [0.0000, 0.6000]])
    """
    check_square(F, "F")
    values, vectors = _descending_eigenbasis(F.to(torch.promote_types(F.dtype, torch.float32)))
    if not values[0].item() > 0:
        raise ValueError("`F` must have a positive eigenvalue; a zero F says that all features are zero (collapsed)")
    # Roundoff may leave eigenvalues slightly negative, or the square root's slope infinite at 0.
    relative = (values / values[0] - shift).clamp_min(0)
    p = torch.where(relative > 0, relative, 1).sqrt() * (relative > 0) + eps
    return (vectors * p) @ vectors.T


def optimal_predictor(F: Tensor, M: Tensor, reg: float = 0.0) -> Tensor:
    r"""The symmetric W with :math:`\frac12 (W F + F W) = M`, the predictor's optimum for given features.

    DirectPred Sec. 4 and Table 1: M is the symmetrised cross moment of target and online features,
    :math:`\frac12 (E[f_a f^T] + E[f f_a^T])`. Solved in F's eigenbasis, with :math:`F + \lambda I` for F.

    Args:
        F: Second moment of the online features, symmetric positive semi-definite ``[d, d]``.
        M: Cross moment, ``[d, d]``; symmetrised here.
        reg: :math:`\lambda \ge 0`; pairs of directions in which F vanishes get 0 when it is 0.

    Example:
        >>> F = torch.diag(torch.tensor([4.0, 1.0]))
        >>> optimal_predictor(F, 2 * F)
        tensor([[2., 0.],
                [0., 2.]])
    """
    F, M = _pair(F, M, names=("F", "M"))
    if reg < 0:
        raise ValueError(f"`reg` must not be negative, got {reg}")
    values, vectors = _descending_eigenbasis(F)
    values = values.clamp_min(0) + reg
    sums = values[:, None] + values[None, :]
    usable = sums > sums.max() * len(F) * torch.finfo(F.dtype).eps
    rotated = vectors.T @ (M + M.T) @ vectors  # twice the symmetrised M: the equation's factor 1/2
    solution = torch.where(usable, rotated / torch.where(usable, sums, 1), 0)
    return vectors @ solution @ vectors.T


def _descending_eigenbasis(F: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh((F + F.T) / 2)
    return values.flip(0), vectors.flip(1)


def _pair(F: Tensor, W: Tensor, names: tuple[str, str] = ("F", "W")) -> tuple[Tensor, Tensor]:
    check_square(F, names[0])
    check_square(W, names[1])
    if F.shape != W.shape:
        raise ValueError(f"`{names[0]}` and `{names[1]}` must agree, got {tuple(F.shape)} and {tuple(W.shape)}")
    dtype = torch.promote_types(torch.promote_types(F.dtype, W.dtype), torch.float32)
    return F.to(dtype), W.to(dtype)


def _precise(x: Tensor) -> Tensor:
    """Double precision where the device has it."""
    return x.float() if x.device.type == "mps" else x.double()

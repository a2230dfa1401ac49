"""The predictor against the second moment of its inputs, worked out in the span of the rows where they are few."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_ssl.functional.checks import check_rows, check_same_shape, check_square

EXISTS = 1e-12  # an eigenvalue below that of the largest is none: roundoff
SMALL = (
    512  # up to this dimension all is in the rows' own precision; beyond it, products with W are in single precision
)
KRYLOV = 64  # and the smallest symmetric value is taken from a Krylov space of so many dimensions


def predictor_values_of_rows(
    inputs: Tensor, outputs: Tensor | None = None, W: Tensor | None = None, intercept: bool = False
) -> dict[str, Tensor]:
    """What :func:`predictor_values` says of a predictor and its inputs' second moment F, from the inputs themselves.

    N rows have at most N modes: where N < d nothing of the size d x d is decomposed. Eigenvalues, values and cosines
    then are those of the min(N, d) modes, 0 where a mode does not exist, and ``cosine_mean`` is over those that do.

    Args:
        inputs: What entered the predictor, ``[N, d]``.
        outputs: What left it, ``[N, d]``: the predictor is then its effective linear map, fitted by least squares.
        W: The predictor itself, ``[d, d]``, instead.
        intercept: Fit an intercept with the effective linear map.

    Example:
        >>> values = predictor_values_of_rows(torch.eye(3)[:2].double(), W=2 * torch.eye(3).double())
        >>> values["predictor_values"], float(values["cosine_mean"])
        (tensor([2., 2.], dtype=torch.float64), 1.0)
    """
    check_rows(inputs, "inputs")
    if (W is None) == (outputs is None):
        raise ValueError("`outputs` or `W` must be given, and not both")
    s, U = modes(inputs)
    tiny = torch.finfo(s.dtype).tiny
    exists = s > EXISTS * s[0]
    if W is not None:
        check_square(W, "W")
        if len(W) != inputs.shape[1]:
            raise ValueError(f"`W` must be [{inputs.shape[1]}, {inputs.shape[1]}], got {tuple(W.shape)}")
        quick = W.float() if len(W) > SMALL else W
        images = (quick @ U.to(quick)).to(U)  # column j is W u_j
    else:
        assert outputs is not None
        check_same_shape(inputs, outputs, ("inputs", "outputs"))
        images = _fitted(inputs @ U, outputs, s * exists, intercept)
    inner = U.T @ images  # u_i^T W u_j
    outside = images - U @ inner  # what W moves out of the span
    norms = images.norm(dim=0)
    cosines = inner.diagonal() / norms.clamp_min(tiny)
    squared = ((s[:, None] - s) * inner).square().sum() + (outside * s).square().sum()
    if W is not None:
        size = W.norm()
        if len(s) < len(W):  # and what it moves into it
            into = U.T.to(quick) @ quick - inner.to(quick) @ U.T.to(quick)
            squared = squared + (s[:, None] * into).square().sum()
        symmetric = (quick + quick.T) / 2
        skew = 2 * torch.linalg.vector_norm(quick - symmetric, dtype=s.dtype)
    else:
        size = images.norm()
        skew = ((inner - inner.T).square().sum() + 2 * outside.square().sum()).sqrt()
        W = images @ U.T
        symmetric = (W + W.T) / 2
    return {
        "eigenvalues": s,
        "predictor_values": inner.diagonal(),
        "cosines": cosines,
        "cosine_mean": (cosines * exists).sum() / exists.sum(),
        "cosine_weighted": (cosines * s).sum() / s.sum().clamp_min(tiny),
        "commutator_norm": squared.sqrt() / (s.norm() * size).clamp_min(tiny),
        "asymmetry": skew / size.clamp_min(tiny),
        "smallest_symmetric_value": smallest_eigenvalue(symmetric, W),
    }


def modes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues ``[r]``, falling, and eigenvectors ``[d, r]`` of E[x x^T], r = min(N, d); 0 where there is none."""
    rows, dim = x.shape
    if rows >= dim:
        values, vectors = torch.linalg.eigh(x.T @ x / rows)
        return values.flip(0).clamp_min(0), vectors.flip(1)
    values, left = torch.linalg.eigh(x @ x.T / rows)
    values, left = values.flip(0).clamp_min(0), left.flip(1)
    exists = values > EXISTS * values[0]
    scale = torch.where(exists, values * rows, 1).rsqrt() * exists
    return values * exists, (x.T @ left) * scale


def _fitted(z: Tensor, y: Tensor, s: Tensor, intercept: bool) -> Tensor:
    """W U of the least-squares map W, from the rows' coordinates z = x U; directions without rows get 0."""
    if not intercept:
        return (y.T @ z) * torch.where(s > 0, 1 / (s * len(z)), 0)
    z, y = z - z.mean(dim=0), y - y.mean(dim=0)
    return y.T @ z @ torch.linalg.pinv(z.T @ z, hermitian=True, rtol=EXISTS)


def smallest_eigenvalue(symmetric: Tensor, W: Tensor) -> Tensor:
    """The smallest eigenvalue of W's symmetric part.

    Of a matrix beyond 512 x 512 from a Krylov space: Lanczos with full reorthogonalisation in single precision, and
    the Rayleigh quotient of what it found in W's own precision, whose error is of second order.

    Example:
        >>> smallest_eigenvalue(torch.tensor([[1.0, 2.0], [2.0, 1.0]]), torch.tensor([[1.0, 3.0], [1.0, 1.0]]))
        tensor(-1.)
    """
    dim = len(W)
    if dim <= SMALL:
        return torch.linalg.eigvalsh(symmetric)[0]
    quick = symmetric.float()
    # A start that does not depend on any generator, and is nobody's eigenvector.
    start = torch.arange(1, dim + 1, device=W.device, dtype=torch.float32).mul(0.754877666).frac() - 0.5
    basis = torch.zeros(KRYLOV, dim, dtype=torch.float32, device=W.device)
    images = torch.zeros_like(basis)
    vector = start
    for k in range(KRYLOV):
        for _ in range(2):  # twice is enough
            vector = vector - basis[:k].T @ (basis[:k] @ vector)
        basis[k] = vector / vector.norm().clamp_min(1e-30)
        images[k] = quick @ basis[k]
        vector = images[k]
    _, inside = torch.linalg.eigh((basis @ images.T + images @ basis.T) / 2)
    found = (inside[:, 0] @ basis).to(W.dtype)
    return found @ (W @ found) / found.square().sum()

"""What features are worth, told without labels: the papers' quantities, all from sums over rows.

Each function takes rows; what it is made of (`*_of_*`) takes moments, so that sums streamed over many batches and ranks
give the same numbers as the rows at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_ssl.functional.checks import check_positive, check_rows
from lightning_ssl.functional.geometry import unit_rows

EPS = 1e-7  # RankMe's and LiDAR's, added to each share


def rankme(x: Tensor, eps: float = EPS, centre: bool = False, power: int = 1) -> Tensor:
    r"""RankMe (Garrido et al. 2023, Eq. 1): the effective rank of an embedding of many samples.

    .. math:: \exp\Big(-\sum_{k=1}^{\min(N, d)} p_k \log p_k\Big), \qquad p_k = \sigma_k^q / \|\sigma^q\|_1 + \epsilon

    Args:
        x: Features, ``[N, d]``, of more samples than dimensions: N bounds it.
        eps: The paper's :math:`\epsilon`.
        centre: Subtract the mean first; the paper does not.
        power: q: 1, singular values (the paper); 2, eigenvalues of the covariance, as some packages have it.

    Example:
        >>> round(float(rankme(torch.eye(3))), 3)
        3.0
    """
    check_rows(x, "x")
    x = x.double()
    x = x - x.mean(dim=0) if centre else x
    return rankme_of_values(torch.linalg.svdvals(x) ** power, eps)


def rankme_of_values(values: Tensor, eps: float = EPS) -> Tensor:
    """The exponential of the entropy of normalised values."""
    p = values / values.sum().clamp_min(torch.finfo(values.dtype).tiny) + eps
    return torch.exp(-(p * p.log()).sum())


def lidar_matrix(x: Tensor, delta: float = 1e-4) -> Tensor:
    r"""LiDAR's matrix :math:`\Sigma_w^{-1/2} \Sigma_b \Sigma_w^{-1/2}` (Thilak et al. 2023, Eqs. 1-3).

    :math:`\Sigma_b` is the covariance of the samples' means over their views, :math:`\Sigma_w` the mean covariance of a
    sample's views plus :math:`\delta I`.

    Args:
        x: Views grouped by sample, ``[N, V, d]`` with V >= 2.
        delta: The paper's :math:`\delta`.

    Example:
        >>> x = torch.tensor([[[1.0, 1.0], [1.0, -1.0]], [[-1.0, 1.0], [-1.0, -1.0]]])
        >>> lidar_matrix(x, delta=1.0)
        tensor([[1., 0.],
                [0., 0.]], dtype=torch.float64)
    """
    _check_views(x)
    x = x.double()
    means = x.mean(dim=1)
    centred, apart = means - means.mean(dim=0), (x - means[:, None]).flatten(0, 1)
    return lidar_matrix_of(centred.T @ centred / len(centred), apart.T @ apart / len(apart), delta)


def lidar_matrix_of(between: Tensor, within: Tensor, delta: float) -> Tensor:
    values, vectors = torch.linalg.eigh(within)
    # A covariance has no negative eigenvalues but by roundoff.
    whiten = (vectors / (values.clamp_min(0) + delta).sqrt()) @ vectors.T
    found = whiten @ between @ whiten
    return (found + found.T) / 2


def lidar(x: Tensor, delta: float = 1e-4, eps: float = EPS) -> Tensor:
    r"""LiDAR (Thilak et al. 2023): the effective rank of what tells samples apart, in units of how their views vary.

    The exponential of the entropy of the normalised eigenvalues of :func:`lidar_matrix`. Views of one sample are one
    class: the grouping is all of it.

    Args:
        x: Views grouped by sample, ``[N, V, d]`` with V >= 2 (the paper: 1,000 samples in 50 views).
        delta: The paper's :math:`\delta`.
        eps: The paper's :math:`\epsilon`.

    Example:
        >>> x = torch.tensor([[[1.0, 1.0], [1.0, -1.0]], [[-1.0, 1.0], [-1.0, -1.0]]])
        >>> round(float(lidar(x)), 3)
        1.0
    """
    return rankme_of_values(torch.linalg.eigvalsh(lidar_matrix(x, delta)).clamp_min(0), eps)


def alpha_req(x: Tensor, modes: tuple[int, int] = (11, 100)) -> Tensor:
    r"""alpha-ReQ (Agrawal et al. 2022): the exponent of the spectrum's decay, :math:`\lambda_i \propto i^{-\alpha}`.

    A line through :math:`(\log i, \log \lambda_i)` with weights 1/i, over the eigenvalues of the covariance numbered
    `modes` (from 1). Near 1 was found best; large means few dimensions.

    Args:
        x: Features, ``[N, d]``.
        modes: First and last eigenvalue of the fit. Where there are not twice as many as `first`, an eighth of those
            there are is left out at the beginning.

    Example:
        >>> x = torch.eye(200).double() * torch.arange(1, 201) ** -0.6
        >>> round(float(alpha_req(torch.cat([x, -x]))), 3)
        1.2
    """
    check_rows(x, "x", min_rows=2)
    x = x.double()
    values = torch.linalg.svdvals(x - x.mean(dim=0)).square()
    return alpha_req_of_values(values[: min(len(x) - 1, x.shape[1])], modes)


def alpha_req_of_values(values: Tensor, modes: tuple[int, int] = (11, 100)) -> Tensor:
    """The exponent of falling eigenvalues; infinite where there are not two."""
    first, last = modes[0], min(modes[1], len(values))
    if last < 2 * first:
        first = max(1, last // 8)
    i = torch.arange(first, last + 1, device=values.device, dtype=values.dtype)
    chosen = values[first - 1 : last]
    alive = chosen > 0
    w = alive / i
    a, b = i.log(), torch.where(alive, chosen, 1).log()
    total = w.sum().clamp_min(torch.finfo(w.dtype).tiny)
    a, b = a - (w * a).sum() / total, b - (w * b).sum() / total
    slope = (w * a * b).sum() / (w * a * a).sum()
    return torch.where(alive.sum() > 1, -slope, math.inf)


def cumulative_spectrum_area(x: Tensor) -> Tensor:
    r"""The area under the cumulative spectrum (Li et al. 2022, Sec. 4): 1/2 spread evenly, 1 on a line.

    The mean over i of :math:`\sum_{j \le i} \sigma_j / \sum_j \sigma_j` with the singular values of the centred
    l2-normalised features.

    Args:
        x: Features, ``[N, d]`` with N > d.

    Example:
        >>> x = torch.eye(4)
        >>> round(float(cumulative_spectrum_area(torch.cat([x, -x]))), 3)
        0.625
    """
    x = unit_rows(x.double(), "x")
    return spectrum_area_of_values(torch.linalg.svdvals(x - x.mean(dim=0)))


def spectrum_area_of_values(values: Tensor) -> Tensor:
    total = values.sum()
    share = values.cumsum(0) / total.clamp_min(torch.finfo(values.dtype).tiny)
    return torch.where(total > 0, share.mean(), 1.0)


def stable_rank(x: Tensor) -> Tensor:
    r"""The stable rank :math:`\|X\|_F^2 / \|X\|_2^2`: how many times the strongest direction all of it is.

    Args:
        x: Features, ``[N, d]``, not centred.

    Example:
        >>> float(stable_rank(torch.diag(torch.tensor([2.0, 1.0]))))
        1.25
    """
    check_rows(x, "x")
    return stable_rank_of_values(torch.linalg.svdvals(x.double()).square())


def stable_rank_of_values(values: Tensor) -> Tensor:
    return values.sum() / values[0].clamp_min(torch.finfo(values.dtype).tiny)


def wasserstein_uniformity(x: Tensor) -> Tensor:
    r"""The Wasserstein form of uniformity (Fang et al. 2024, Eq. 10): 0 uniform on the sphere, larger collapsed.

    The distance of N(μ, Σ) of the l2-normalised features from N(0, I/d):
    :math:`\sqrt{\|\mu\|^2 + 1 + \mathrm{tr}\,\Sigma - \tfrac{2}{\sqrt d}\,\mathrm{tr}\,\Sigma^{1/2}}`. Unlike the
    pairwise form it sees lost dimensions.

    Args:
        x: Features, ``[N, d]``.

    Example:
        >>> x = torch.eye(3)
        >>> round(float(wasserstein_uniformity(torch.cat([x, -x]))), 4)
        0.0
    """
    x = unit_rows(x.double(), "x")
    mean = x.mean(dim=0)
    values = torch.linalg.svdvals(x - mean).square() / len(x)
    return wasserstein_uniformity_of(mean, values, x.shape[1])


def wasserstein_uniformity_of(mean: Tensor, values: Tensor, dim: int) -> Tensor:
    values = values.clamp_min(0)
    squared = mean.square().sum() + 1 + values.sum() - 2 / math.sqrt(dim) * values.sqrt().sum()
    return squared.clamp_min(0).sqrt()


# SIGReg ---------------------------------------------------------------------------------------------------------------

_KNOTS = 17


def slices(dim: int, number: int, seed: int = 0, device: torch.device | None = None) -> Tensor:
    """Random directions ``[d, number]`` on the unit sphere, the same for the same seed."""
    directions = torch.randn(dim, number, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (directions / directions.norm(dim=0)).to(device)


def wave_sums(x: Tensor, directions: Tensor) -> Tensor:
    """Sums over rows of cos and sin of t a·x at the knots t >= 0, ``[2, M, 9]``; they determine the others."""
    knots = torch.linspace(0, 5, (_KNOTS + 1) // 2, dtype=x.dtype, device=x.device)
    along = (x @ directions.to(x.dtype))[..., None] * knots
    return torch.stack([along.cos().sum(0), along.sin().sum(0)])


def gaussianity_of_waves(waves: Tensor, count: Tensor | float) -> Tensor:
    knots = torch.linspace(0, 5, waves.shape[-1], dtype=waves.dtype, device=waves.device)
    normal = torch.exp(-0.5 * knots**2)
    real, imaginary = waves / count
    error = ((real - normal).square() + imaginary.square()) * normal
    return (2 * torch.trapezoid(error, knots) * count).mean()  # even in t


def sliced_gaussianity(x: Tensor, directions: int = 256, seed: int = 0) -> Tensor:
    r"""SIGReg's statistic (LeJEPA, Balestriero & LeCun 2025): how far features are from an isotropic Gaussian.

    The Epps-Pulley statistic :math:`N \int |\hat\varphi(t) - e^{-t^2/2}|^2 e^{-t^2/2} dt` over [-5, 5] (17 knots,
    trapezoids), averaged over random directions a, with :math:`\hat\varphi` the empirical characteristic function of
    a·x. About 1 for N(0, I), and proportional to N for anything else.

    Args:
        x: Features, ``[N, d]``, as they are.
        directions: Number of random directions.
        seed: Of the directions.

    Example:
        >>> x = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))
        >>> float(sliced_gaussianity(x)) < 2 < float(sliced_gaussianity(3 * x))
        True
    """
    check_rows(x, "x")
    x = x.double()
    return gaussianity_of_waves(wave_sums(x, slices(x.shape[1], directions, seed, x.device)), len(x))


# Prototypes, targets, modes -------------------------------------------------------------------------------------------


class PrototypeUseResult(NamedTuple):
    """What :func:`prototype_use` returns.

    Attributes:
        mean_assignment_entropy: Entropy of the mean assignment: ln K when all prototypes share, 0 when one has all.
        assignment_entropy: Mean entropy of an assignment: ln K when it says nothing, 0 when it is certain.
        used: Share of prototypes that are some row's first choice.
        teacher_kl: KL of the teacher's from the student's assignments; NaN without a teacher.
    """

    mean_assignment_entropy: Tensor
    assignment_entropy: Tensor
    used: Tensor
    teacher_kl: Tensor


def prototype_sums(logits: Tensor, temperature: float, teacher: Tensor | None, teacher_temperature: float) -> Tensor:
    """Sums over rows, ``[2K + 3]``: assignments, first choices, entropies, KLs, and the count."""
    check_rows(logits, "logits")
    check_positive(temperature, "temperature")
    log_p = (logits.double() / temperature).log_softmax(dim=1)
    p = log_p.exp()
    first = torch.zeros_like(p).scatter_(1, log_p.argmax(dim=1, keepdim=True), 1.0)
    kl = p.new_full((), math.nan)
    if teacher is not None:
        check_rows(teacher, "teacher")
        check_positive(teacher_temperature, "teacher_temperature")
        if teacher.shape != logits.shape:
            raise ValueError(
                f"`teacher` must have the shape of `logits`, got {tuple(teacher.shape)} and {tuple(logits.shape)}"
            )
        log_q = (teacher.double() / teacher_temperature).log_softmax(dim=1)
        kl = (log_q.exp() * (log_q - log_p)).sum()
    rest = torch.stack([-(p * log_p).sum(), kl, p.new_tensor(float(len(p)))])
    return torch.cat([p.sum(0), first.sum(0), rest])


def prototype_use_of(sums: Tensor) -> PrototypeUseResult:
    count, dim = sums[-1], (len(sums) - 3) // 2
    mean = sums[:dim] / count
    entropy = -torch.special.xlogy(mean, mean).sum()
    used = (sums[dim : 2 * dim] > 0).double().mean()
    return PrototypeUseResult(entropy, sums[-3] / count, used, sums[-2] / count)


def prototype_use(
    logits: Tensor, temperature: float = 0.1, teacher: Tensor | None = None, teacher_temperature: float = 0.04
) -> PrototypeUseResult:
    """How a softmax over K prototypes is used (DINO, SwAV): entropies, share in use, distance from a teacher.

    Args:
        logits: Scores ``[N, K]``.
        temperature: What they are divided by.
        teacher: A teacher's scores of the same rows, centred if it centres.
        teacher_temperature: What those are divided by.

    Example:
        >>> found = prototype_use(10 * torch.eye(4))
        >>> round(float(found.mean_assignment_entropy), 4), float(found.used)
        (1.3863, 1.0)
    """
    return prototype_use_of(prototype_sums(logits, temperature, teacher, teacher_temperature))


def target_lag(online: Iterable[Tensor], target: Iterable[Tensor], previous: Iterable[Tensor]) -> Tensor:
    r"""How many updates a moving-average target is behind: its distance to the online weights over an update's size.

    :math:`\|\theta - \xi\| / \|\theta - \theta_{prev}\|`; m / (1 - m) for steady updates in one direction, 0 where the
    target is the online network, growing with the run where it stands still.

    Args:
        online: The online network's weights.
        target: The target's, in the same order.
        previous: The online network's before its last update.

    Example:
        >>> float(target_lag([torch.tensor([3.0])], [torch.tensor([1.0])], [torch.tensor([2.5])]))
        4.0
    """
    triples = list(zip(online, target, previous, strict=True))
    if not triples or any(a.shape != b.shape or a.shape != c.shape for a, b, c in triples):
        raise ValueError("`online`, `target` and `previous` must be the same weights, at least one; compare twins")
    apart = torch.stack([(a.detach() - b.detach()).double().square().sum() for a, b, _ in triples]).sum()
    update = torch.stack([(a.detach() - c.detach()).double().square().sum() for a, _, c in triples]).sum()
    return (apart / update.clamp_min(torch.finfo(torch.float64).tiny)).sqrt()


def mode_growth(before: Tensor, after: Tensor, steps: float) -> Tensor:
    r"""The growth rate a step of each mode of F: :math:`\log(s_j(t_2) / s_j(t_1)) / (t_2 - t_1)`, by falling s.

    In stepwise learning (Simon et al. 2023) modes rise one after another; in a collapse all but a few fall.

    Args:
        before: Eigenvalues of the second moment at the first moment, ``[d]``, falling.
        after: At the second.
        steps: Between the two.

    Example:
        >>> mode_growth(torch.tensor([1.0, 1.0]), torch.tensor([4.0, 1.0]), steps=2)
        tensor([0.6931, 0.0000])
    """
    check_positive(steps, "steps")
    if before.shape != after.shape or before.ndim != 1:
        raise ValueError(
            f"`before` and `after` must be eigenvalues of the same dimension, got {tuple(before.shape)} and "
            f"{tuple(after.shape)}"
        )
    tiny = torch.finfo(after.dtype).tiny
    return (after.clamp_min(tiny).log() - before.clamp_min(tiny).log()) / steps


# All of them from one set of sums -------------------------------------------------------------------------------------


def _check_views(x: Tensor) -> None:
    if x.ndim != 3 or x.shape[1] < 2:
        raise ValueError(f"`x` must be views grouped by sample [N, V, d] with V >= 2, got shape {tuple(x.shape)}")
    check_rows(x.flatten(0, 1), "x")


def feature_sums(x: Tensor, directions: Tensor) -> dict[str, Tensor]:
    """The sums over rows that :func:`quality_of_sums` needs, of ``[N, d]`` or of views ``[N, V, d]``."""
    views = x.double() if x.ndim == 3 else x.double()[:, None]
    rows = views.flatten(0, 1)
    check_rows(rows, "x")
    norms = rows.norm(dim=1, keepdim=True)
    unit = torch.where(norms > 0, rows / norms.clamp_min(torch.finfo(rows.dtype).tiny), 0)
    sums = {
        "count": rows.new_tensor(float(len(rows))),
        "total": rows.sum(0),
        "moment": rows.T @ rows,
        "unit_total": unit.sum(0),
        "unit_moment": unit.T @ unit,
        "waves": wave_sums(rows, directions),
    }
    if views.shape[1] > 1:
        means = views.mean(dim=1)
        sums |= {"samples": rows.new_tensor(float(len(views))), "between": means.T @ means}
    return sums


def quality_of_sums(sums: dict[str, Tensor], delta: float = 1e-4) -> dict[str, Tensor]:
    """Every quantity of this file that features have, by its name; and the eigenvalues of F, ``"modes"``."""
    n, dim = sums["count"], len(sums["total"])
    mean, unit_mean = sums["total"] / n, sums["unit_total"] / n
    moment, unit_moment = sums["moment"] / n, sums["unit_moment"] / n
    rank = int(min(float(n), dim))
    second = falling_eigenvalues(moment)
    centred = falling_eigenvalues(moment - torch.outer(mean, mean))
    unit = falling_eigenvalues(unit_moment - torch.outer(unit_mean, unit_mean))
    found = {
        "rankme": rankme_of_values(second[:rank].sqrt()),
        "alpha_req": alpha_req_of_values(centred[: max(1, min(int(n) - 1, dim))]),
        "spectrum_area": spectrum_area_of_values(unit[:rank].sqrt()),
        "stable_rank": stable_rank_of_values(second),
        "wasserstein_uniformity": wasserstein_uniformity_of(unit_mean, unit, dim),
        "sliced_gaussianity": gaussianity_of_waves(sums["waves"], n),
        "modes": second,
    }
    if "samples" in sums and float(sums["samples"]):
        samples = sums["samples"]
        between = sums["between"] / samples
        within = moment - between  # as many views of each
        matrix = lidar_matrix_of(between - torch.outer(mean, mean), within, delta)
        found["lidar"] = rankme_of_values(torch.linalg.eigvalsh(matrix).clamp_min(0))
    return found


def falling_eigenvalues(matrix: Tensor) -> Tensor:
    """The eigenvalues of a second moment; what is below the roundoff of its sum is 0, its square root would count."""
    values = torch.linalg.eigvalsh(matrix).flip(0)
    floor = values[0].clamp_min(0) * len(values) * torch.finfo(values.dtype).eps
    return torch.where(values > floor, values, 0)

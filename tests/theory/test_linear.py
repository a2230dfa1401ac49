"""The linear dynamics against closed forms, autograd and discrete training."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_ssl.theory import ema, linear
from lightning_ssl.theory.linear import CorrelationDynamics, LinearDynamics, ModeDynamics

D = torch.float64


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D) * scale


def spd(n: int, seed: int, floor: float = 0.3) -> torch.Tensor:
    a = randn(n, n, seed=seed)
    return a @ a.T / n + floor * torch.eye(n, dtype=D)


def test_integrator_against_the_matrix_exponential() -> None:
    A, x = randn(4, 4, seed=1), randn(4, 2, seed=2)
    times = torch.linspace(0, 2, 7, dtype=D)
    (got,) = linear.integrate(lambda s: (A @ s[0],), (x,), times)
    exact = torch.stack([torch.linalg.matrix_exp(A * t) @ x for t in times])
    torch.testing.assert_close(got, exact, rtol=1e-7, atol=1e-8)


def test_integrator_says_when_the_state_diverges() -> None:
    with pytest.raises(ValueError, match="diverges"):
        linear.integrate(lambda s: (s[0] ** 2,), (torch.ones(1, dtype=D),), [0.0, 2.0])


@pytest.mark.parametrize("stop_gradient", [True, False])
def test_field_is_the_gradient_of_the_loss(stop_gradient: bool) -> None:
    """Population gradients of 1/2 E|W_p W x1 - W_a x2|^2 by autograd on an enumerated population."""
    n1, n2, samples, views = 4, 3, 40, 6
    mean, noise = randn(samples, n1, seed=1), randn(samples, views, n1, seed=2, scale=0.4)
    noise = noise - noise.mean(1, keepdim=True)
    x = mean.unsqueeze(1) + noise
    X = mean.T @ mean / samples
    X_aug = torch.einsum("svi,svj->ij", noise, noise) / (samples * views)
    W, W_p, W_a = (randn(*s, seed=i, scale=0.5) for i, s in enumerate(((n2, n1), (n2, n2), (n2, n1))))
    if not stop_gradient:
        W_a = W
    W.requires_grad_(), W_p.requires_grad_()
    target = x @ W.T if not stop_gradient else (x @ W_a.T).detach()
    online = x @ W.T @ W_p.T
    # Two views drawn independently: all pairs, (v, v) among them.
    r = (online.unsqueeze(2) - target.unsqueeze(1)).square().sum(-1).mean() / 2
    r.backward()
    dynamics = LinearDynamics(
        X, X_aug, alpha_p=2.0, beta=None if not stop_gradient else 0.5, stop_gradient=stop_gradient
    )
    dW, dW_p, _ = dynamics.field(W.detach(), W_p.detach(), W_a.detach())
    torch.testing.assert_close(dW, -W.grad)
    torch.testing.assert_close(dW_p, -2.0 * W_p.grad)


def test_without_stop_gradient_the_loss_decays_at_the_stated_rate() -> None:
    """Theorem 2: d vec(W)/dt = -[X' (x) (W_p^T W_p + I) + X (x) (W_p - I)^T (W_p - I)] vec(W)."""
    X, X_aug, W, W_p = spd(4, 1), spd(4, 2), randn(3, 4, seed=3), randn(3, 3, seed=4)
    frozen = LinearDynamics(X, X_aug, stop_gradient=False, train_predictor=False)
    eye = torch.eye(3, dtype=D)
    M = torch.kron(X_aug, W_p.T @ W_p + eye) + torch.kron(X, (W_p - eye).T @ (W_p - eye))
    assert torch.linalg.eigvalsh(M).min() > 0
    W_t = frozen.solve(W, W_p, [0.0, 0.7]).W[-1]
    exact = torch.linalg.matrix_exp(-0.7 * M) @ W.T.reshape(-1)  # vec stacks columns
    torch.testing.assert_close(W_t.T.reshape(-1), exact, rtol=1e-7, atol=1e-9)
    trained = LinearDynamics(X, X_aug, stop_gradient=False).solve(W, W_p, [0.0, 60.0])
    assert trained.W[-1].norm() < 1e-3 * W.norm()


@pytest.mark.parametrize("beta", [None, 0.4])
@pytest.mark.parametrize("eta", [0.0, 0.05])
def test_balance_invariant(beta: float | None, eta: float) -> None:
    dynamics = LinearDynamics(spd(4, 1), spd(4, 2), alpha_p=3.0, beta=beta, eta=eta)
    times = torch.linspace(0, 10, 6, dtype=D)
    W = randn(3, 4, seed=5, scale=0.3)
    path = dynamics.solve(W, randn(3, 3, seed=6, scale=0.3), times, None if beta is None else torch.zeros_like(W))
    C = linear.balance(path.W, path.W_p, 3.0)
    torch.testing.assert_close(C, torch.exp(-2 * eta * times)[:, None, None] * C[0], rtol=1e-6, atol=1e-8)


def test_discrete_training_follows_the_flow() -> None:
    """Full-batch SGD on the enumerated loss, by autograd, with weight decay and EMA."""
    n1, n2, step = 4, 3, 2e-3
    X, X_aug = spd(n1, 1), 0.2 * spd(n1, 2)
    dynamics = LinearDynamics(X, X_aug, alpha_p=1.5, beta=0.6, eta=0.03)
    W, W_p = randn(n2, n1, seed=3, scale=0.4), randn(n2, n2, seed=4, scale=0.4)
    W_a = W.clone()
    w, p, a = W.clone().requires_grad_(), W_p.clone().requires_grad_(), W_a.clone()
    optimizer = torch.optim.SGD(
        [
            {"params": [w], "lr": step, "weight_decay": 0.03},
            {"params": [p], "lr": 1.5 * step, "weight_decay": 0.03 / 1.5},
        ]
    )
    steps = 3000
    for _ in range(steps):
        loss = 0.5 * torch.trace(p @ w @ (X + X_aug) @ w.T @ p.T) - torch.trace(p @ w @ X @ a.T)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        a = a + step * 0.6 * (w.detach() - a)
    path = dynamics.solve(W, W_p, [0.0, steps * step], W_a)
    for discrete, flow in zip((w, p, a), path, strict=True):
        assert (discrete - flow[-1]).norm() < 2e-3 * flow[-1].norm()


@pytest.mark.parametrize(("tau", "sigma2", "eta", "alpha_p"), [(1.0, 0.0, 0.01, 1.0), (0.7, 0.5, 0.05, 3.0)])
def test_fixed_points_in_closed_form(tau: float, sigma2: float, eta: float, alpha_p: float) -> None:
    points = linear.fixed_points(eta, tau, sigma2, alpha_p)
    root = math.sqrt(tau**2 - 4 * eta * (1 + sigma2))
    assert [f.p for f in points] == pytest.approx([0, (tau - root) / (2 + 2 * sigma2), (tau + root) / (2 + 2 * sigma2)])
    assert [f.stable for f in points] == [True, False, True]
    mode = ModeDynamics.isotropic(sigma2, alpha_p, None, eta)
    for f in points:
        dp, ds = mode.field(torch.tensor(f.p, dtype=D), torch.tensor(f.s, dtype=D), tau)
        assert abs(dp) < 1e-15 and abs(ds) < 1e-15
        # Stability against the Jacobian by autograd.
        point = torch.tensor([f.p, f.s], dtype=D)
        jac = torch.autograd.functional.jacobian(lambda y: torch.stack(mode.field(y[0], y[1], tau)), point)
        assert sorted(torch.linalg.eigvals(jac).real.tolist()) == pytest.approx(f.eigenvalues)


def test_threshold_of_weight_decay() -> None:
    critical = linear.critical_weight_decay(0.8, 0.25)
    assert critical == pytest.approx(0.64 / 5)
    assert len(linear.fixed_points(critical * 1.001, 0.8, 0.25)) == 1
    assert len(linear.fixed_points(critical * 0.999, 0.8, 0.25)) == 3
    # Either side of it a strong mode collapses or survives.
    for factor, survives in ((0.98, True), (1.02, False)):
        mode = ModeDynamics.isotropic(0.25, 1.0, None, critical * factor)
        end = mode.solve(torch.tensor([0.6]), torch.tensor([0.36]), [0.0, 3000.0], tau=0.8, freeze_tau=True)
        assert (end.p[-1] > 0.1).item() is survives


def test_basins_on_the_parabola_and_off_it() -> None:
    eta, sigma2 = 0.05, 0.3
    zero, saddle, stable = linear.fixed_points(eta, 1.0, sigma2)
    mode = ModeDynamics.isotropic(sigma2, 1.0, None, eta)
    p = torch.tensor([saddle.p * 0.99, saddle.p * 1.01], dtype=D)
    end = mode.solve(p, p**2, [0.0, 2000.0])
    assert end.p[-1].tolist() == pytest.approx([zero.p, stable.p], abs=1e-4)
    curve = linear.separatrix(eta, 1.0, sigma2)
    inside = curve[(curve[:, 1] > 1e-3) & (curve[:, 1] < 2)][::40]
    assert len(inside) >= 4
    for q, s in inside.tolist():
        end = mode.solve(torch.tensor([q - 0.02, q + 0.02]), torch.tensor([s, s]), [0.0, 2000.0])
        assert end.s[-1, 0] < 1e-3 and end.s[-1, 1] == pytest.approx(stable.s, abs=1e-3)


def test_modes_are_the_matrices_when_aligned() -> None:
    """Diagonal matrices of the full dynamics follow the decoupled triplets, with EMA and decay."""
    sigma2, n = 0.2, 3
    eye = torch.eye(n, dtype=D)
    full = LinearDynamics(eye, sigma2 * eye, alpha_p=2.0, beta=0.4, eta=0.02)
    w, p, tau = torch.tensor([0.2, 0.5, 1.0], dtype=D), torch.tensor([0.4, 0.1, 0.8], dtype=D), 0.3
    times = torch.linspace(0, 20, 9, dtype=D)
    path = full.solve(torch.diag(w), torch.diag(p), times, torch.diag(tau * w))
    modes = ModeDynamics.isotropic(sigma2, 2.0, 0.4, 0.02).solve(p, w**2, times, tau)
    torch.testing.assert_close(path.W_p.diagonal(dim1=1, dim2=2), modes.p, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(path.W.diagonal(dim1=1, dim2=2) ** 2, modes.s, rtol=1e-6, atol=1e-9)
    invariant = modes.s - modes.p**2 / 2.0
    torch.testing.assert_close(invariant, torch.exp(-0.04 * times)[:, None] * invariant[0], rtol=1e-6, atol=1e-9)
    # Eq. 15: tau on the invariant parabola, starting from tau = 0, as an integral over p.
    start = torch.tensor([0.5], dtype=D)
    fine = torch.linspace(0, 10, 4001, dtype=D)
    mode = ModeDynamics.isotropic(sigma2, 1.0, 0.4, 0.02).solve(start, start**2, fine, 0.0)
    kernel = mode.p[:, 0] * torch.exp(0.4 * fine)
    integral = torch.cumulative_trapezoid(kernel, fine)
    tau_exact = 0.4 * torch.exp(-0.4 * fine[1:]) * integral / mode.p[1:, 0]
    torch.testing.assert_close(mode.tau[1:, 0], tau_exact, rtol=1e-4, atol=1e-6)


def test_commutator_law_and_bound() -> None:
    """Theorem 3: the commutator obeys its law, and shrinks at least as fast as K's least eigenvalue says."""
    F, W_p = spd(4, 1), (lambda a: (a + a.T) / 2)(randn(4, 4, seed=2, scale=0.3))
    sigma2, alpha_p, eta, tau = 0.3, 2.0, 0.6, 0.5
    dynamics = CorrelationDynamics(sigma2, alpha_p, eta)
    dF, dW_p, _ = dynamics.field(F, W_p, torch.tensor(tau, dtype=D))
    L = F @ W_p - W_p @ F
    dL = dF @ W_p + F @ dW_p - dW_p @ F - W_p @ dF
    K = linear.alignment_matrix(F, W_p, sigma2, alpha_p, eta, tau)
    torch.testing.assert_close(dL, -(L @ K + K @ L))
    times = torch.linspace(0, 4, 41, dtype=D)
    F_t, W_t, _ = dynamics.solve(F, W_p, times, tau)
    least = min(
        torch.linalg.eigvalsh(linear.alignment_matrix(f, w, sigma2, alpha_p, eta, tau)).min().item()
        for f, w in zip(F_t, W_t, strict=True)
    )
    assert least > 0
    norm = (F_t @ W_t - W_t @ F_t).flatten(1).norm(dim=1)
    assert (norm <= torch.exp(-2 * least * times) * norm[0] + 1e-10).all()


def test_correlation_dynamics_is_the_matrix_dynamics() -> None:
    """F = W W^T of the full dynamics under W_a = tau W: here tau = 1, not symmetrised and symmetrised."""
    eye = torch.eye(3, dtype=D)
    W, W_p = randn(3, 3, seed=1, scale=0.5), (lambda a: a + a.T)(randn(3, 3, seed=2, scale=0.2))
    times = torch.linspace(0, 3, 4, dtype=D)
    for symmetric in (True, False):
        full = LinearDynamics(eye, 0.2 * eye, 1.5, None, 0.03, symmetric=symmetric).solve(W, W_p, times)
        F, P, _ = CorrelationDynamics(0.2, 1.5, 0.03, symmetric=symmetric).solve(W @ W.T, W_p, times)
        torch.testing.assert_close(F, full.W @ full.W.mT, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(P, full.W_p, rtol=1e-6, atol=1e-9)


def test_tied_weights_of_figure_10() -> None:
    """lambda_s = 1, lambda_d = 1/2, alpha_p = beta = 1: w = w_p stays so and ends at 1/2; fixed w_p = 1 collapses."""
    mode = ModeDynamics(1.0, 0.5, 1.0, 1.0)
    one = torch.tensor([0.1], dtype=D)
    w, w_p, w_a = linear.integrate(
        lambda y: mode.triplet_field(*y), (one, one, torch.tensor([0.9], dtype=D)), [0.0, 400.0]
    )
    assert w[-1].item() == pytest.approx(0.5, abs=1e-4) and w_a[-1].item() == pytest.approx(0.5, abs=1e-4)
    torch.testing.assert_close(w, w_p)
    eye = torch.ones(1, 1, dtype=D)
    without = LinearDynamics(0.5 * eye, 0.5 * eye, 1.0, 1.0, train_predictor=False).solve(eye, eye, [0.0, 100.0])
    assert without.W[-1].abs().item() < 1e-8


def test_non_isotropic_fixed_points_and_their_stability() -> None:
    sigma_d, sigma_s = linear.additive_scrambling(spd(5, 1), spd(5, 2))
    values, rows = linear.top_modes(sigma_d, sigma_s, 2)
    exact = torch.linalg.eigvals(sigma_d @ torch.linalg.inv(sigma_s)).real.sort(descending=True).values
    torch.testing.assert_close(values, exact[:2])
    S = randn(2, 2, seed=3)
    W, W_p = S @ rows, S @ torch.diag(values) @ torch.linalg.inv(S)
    dynamics = LinearDynamics(sigma_d, sigma_s - sigma_d, beta=0.5)
    for derivative in dynamics.field(W, W_p, W):
        assert derivative.abs().max() < 1e-12
    # From a generic start the rows of W span the top modes, and W_p has their eigenvalues.
    path = dynamics.solve(randn(2, 5, seed=4, scale=0.3), 0.5 * torch.eye(2, dtype=D), [0.0, 4000.0])
    end = path.W[-1]
    residual = end - end @ torch.linalg.pinv(rows) @ rows
    assert residual.norm() < 1e-3 * end.norm()
    assert sorted(torch.linalg.eigvals(path.W_p[-1]).real.tolist()) == pytest.approx(sorted(values.tolist()), abs=1e-3)


def numeric_jacobian(dynamics: LinearDynamics, W: torch.Tensor, W_p: torch.Tensor, W_a: torch.Tensor) -> torch.Tensor:
    def flat(state: torch.Tensor) -> torch.Tensor:
        parts = state.split([W.numel(), W_p.numel(), W_a.numel()])
        field = dynamics.field(parts[0].view_as(W), parts[1].view_as(W_p), parts[2].view_as(W_a))
        return torch.cat([f.flatten() for f in field])

    return torch.autograd.functional.jacobian(flat, torch.cat([W.flatten(), W_p.flatten(), W_a.flatten()]))


@pytest.mark.parametrize("choose", [(0, 1), (0, 2), (1, 2), (3, 4)])
def test_modes_that_leave_out_a_larger_one_are_unstable(choose: tuple[int, int]) -> None:
    """DirectPred D.1: any k modes are a fixed point; only the k largest have no direction in which to leave it."""
    sigma_d, sigma_s = linear.additive_scrambling(spd(5, 1), spd(5, 2))
    values, rows = linear.top_modes(sigma_d, sigma_s, 2, choose)
    W, W_p = rows, torch.diag(values)
    dynamics = LinearDynamics(sigma_d, sigma_s - sigma_d, beta=0.5)
    assert all(derivative.abs().max() < 1e-12 for derivative in dynamics.field(W, W_p, W))
    eigenvalues = torch.linalg.eigvals(numeric_jacobian(dynamics, W, W_p, W)).real
    assert (eigenvalues.max() > 1e-4) == (choose != (0, 1))
    if choose != (0, 1):
        start = W + 1e-3 * randn(2, 5, seed=5)
        path = dynamics.solve(start, W_p, [0.0, 4000.0])
        top = linear.top_modes(sigma_d, sigma_s, 2)[1]
        residual = path.W[-1] - path.W[-1] @ torch.linalg.pinv(top) @ top
        assert residual.norm() < 1e-2 * path.W[-1].norm()  # it leaves for the largest ones


@pytest.mark.parametrize(("tau", "sigma2", "alpha_p", "eta"), [(1.0, 0.0, 1.0, 0.1), (0.8, 0.3, 2.0, 0.05)])
def test_predictor_fixed_point(tau: float, sigma2: float, alpha_p: float, eta: float) -> None:
    """SM Eqs. 55-59: a zero of the predictor's flow, symmetric, and where a predictor that is not symmetric ends."""
    F = spd(4, 3)
    rest = linear.predictor_fixed_point(F, tau, sigma2, alpha_p, eta)
    torch.testing.assert_close(rest, rest.T)

    def flow(W_p: torch.Tensor) -> torch.Tensor:
        return -alpha_p * (1 + sigma2) * W_p @ F + alpha_p * tau * F - eta * W_p

    assert flow(rest).abs().max() < 1e-12
    end = linear.integrate(lambda s: (flow(s[0]),), (randn(4, 4, seed=6),), [0.0, 400.0])[0][-1]
    torch.testing.assert_close(end, rest, atol=1e-6, rtol=0)
    # Without decay, where F vanishes nothing moves; here the solution that vanishes with it.
    flat = torch.diag(torch.tensor([1.0, 0.0], dtype=D))
    torch.testing.assert_close(linear.predictor_fixed_point(flat, tau, sigma2), flat * tau / (1 + sigma2))


def test_raft_encoders_at_rest_share_eigenvalues_with_the_predictor() -> None:
    """RAFT App. H: W theta = theta B A^-1, checked by the gradients of the loss themselves."""
    n = 3
    B = spd(n, 1)
    A = B + spd(n, 2)
    M = B @ torch.linalg.inv(A)

    def gradients(theta: torch.Tensor, W: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of E|W theta x_1 - xi x_2|^2 at xi = theta, from its moments."""
        theta, W = theta.clone().requires_grad_(), W.clone().requires_grad_()
        xi = theta.detach()
        loss = (W @ theta @ A @ theta.T @ W.T).trace() - 2 * (W @ theta @ B.T @ xi.T).trace()
        return torch.autograd.grad(loss, (theta, W))

    assert len(linear.stationary_encoders(randn(n, n, seed=3), A, B)) == 0  # drawn at random: only the collapse
    values = torch.linalg.eigvals(M).real
    shared = torch.diag(torch.stack([values[0], values[2], torch.tensor(5.0, dtype=D)]))
    S = randn(n, n, seed=4)
    W = S @ shared @ torch.linalg.inv(S)
    basis = linear.stationary_encoders(W, A, B)
    assert basis.shape == (2, n, n)
    for theta in (*basis, basis.sum(0)):
        assert theta.norm() > 0.1 and (W @ theta - theta @ M).abs().max() < 1e-8
        assert all(g.abs().max() < 1e-8 for g in gradients(theta, W))
    assert max(float(g.abs().max()) for g in gradients(randn(n, n, seed=5), W)) > 1e-2
    # A predictor that has learnt its encoder: any invertible theta is at rest, with W = theta M theta^-1.
    theta = randn(n, n, seed=6)
    assert len(linear.stationary_encoders(theta @ M @ torch.linalg.inv(theta), A, B)) == n
    # Views that are equal along a direction leave the identity something to rest on; others do not.
    assert len(linear.stationary_encoders(torch.eye(2, dtype=D), torch.diag(torch.tensor([1.0, 2.0], dtype=D)),
                                          torch.diag(torch.tensor([1.0, 1.0], dtype=D)))) == 2  # fmt: skip
    assert len(linear.stationary_encoders(torch.eye(n, dtype=D), A, B)) == 0


def test_multiplicative_scrambling_by_sampling() -> None:
    U = torch.linalg.qr(randn(4, 2, seed=1)).Q
    S = spd(4, 2)
    sigma_d, sigma_s = linear.multiplicative_scrambling(S, U)
    P = torch.eye(4, dtype=D) - U @ U.T
    torch.testing.assert_close(sigma_d @ torch.linalg.inv(sigma_s), P, atol=1e-10, rtol=0)
    n = 200_000
    x = randn(n, 4, seed=3) @ torch.linalg.cholesky(S).T
    views = []
    for seed in (4, 5):
        B = randn(n, 2, 2, seed=seed)
        views.append(x @ P + torch.einsum("ij,nj->ni", U, torch.einsum("nij,nj->ni", B, x @ U)))
    assert (views[0].T @ views[0] / n - sigma_s).abs().max() < 0.03
    assert (views[0].T @ views[1] / n - sigma_d).abs().max() < 0.03


def test_theorem_9() -> None:
    assert ema.growth_rate(0.03, 0.004, 0.5) == pytest.approx(0.00168154, abs=5e-9)
    assert ema.growth_bound(0.03, 0.004, 0.5) == pytest.approx(0.00176471, abs=5e-9)
    for lam in (-0.3, 0.0, 0.5, 2.0):
        w = ema.simulate(0.03, 0.004, lam, 20_000)
        assert (w[-1] / w[-2] - 1).item() == pytest.approx(ema.growth_rate(0.03, 0.004, lam), abs=1e-9)
        assert lam < 0 or ema.growth_rate(0.03, 0.004, lam) <= ema.growth_bound(0.03, 0.004, lam)
    # A slower EMA grows more slowly.
    assert ema.growth_rate(0.03, 0.004, 0.5) < ema.growth_rate(0.03, 1.0, 0.5)


def test_refuses_bad_input() -> None:
    eye = torch.eye(2)
    with pytest.raises(ValueError, match=r"`eta` must not be negative.*got -0\.1"):
        LinearDynamics(eye, eye, eta=-0.1)
    with pytest.raises(ValueError, match=r"`alpha_p` must be positive.*got 0"):
        ModeDynamics(alpha_p=0.0)
    with pytest.raises(ValueError, match=r"`W_p` must be square.*\(2, 3\)"):
        LinearDynamics(eye, eye).solve(torch.ones(2, 2), torch.ones(2, 3), [0.0, 1.0])
    with pytest.raises(ValueError, match="`W` must be"):
        LinearDynamics(eye, eye).solve(torch.ones(3, 2), torch.eye(2), [0.0, 1.0])
    with pytest.raises(ValueError, match="`W_p` must be symmetric"):
        LinearDynamics(eye, eye, symmetric=True).solve(torch.eye(2), torch.tensor([[1.0, 2.0], [0.0, 1.0]]), [0.0, 1.0])
    with pytest.raises(ValueError, match="`beta` must be None with stop_gradient=False"):
        LinearDynamics(eye, eye, beta=0.4, stop_gradient=False)
    with pytest.raises(ValueError, match="no isolated fixed points"):
        linear.fixed_points(0.0)
    with pytest.raises(ValueError, match=r"`eta`.*got -1"):
        linear.fixed_points(-1.0)
    with pytest.raises(ValueError, match="every start collapses"):
        linear.separatrix(1.0)
    with pytest.raises(ValueError, match="increasing"):
        linear.integrate(lambda s: s, (eye,), [1.0, 0.0])
    with pytest.raises(ValueError, match=r"`eta`.*got 0"):
        ema.growth_rate(0.1, 0.0, 0.5)

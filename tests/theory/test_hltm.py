"""HLTM networks: the hand-written step, correlations and covariance operators against independent computations."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch.func import functional_call, jacrev, vmap

from lightning_ssl.theory import hltm
from lightning_ssl.theory.hltm import HLTM, HLTMNetwork

D = torch.float64


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def leaf_law(tree: HLTM, run: int, root: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All leaf patterns of a binary tree and their exact probabilities given the root, by enumerating every latent."""
    sizes = [tree.branching**level for level in range(1, tree.depth + 1)]
    patterns = torch.tensor(list(itertools.product([0, 1], repeat=sizes[-1])))
    prob = torch.zeros(len(patterns), dtype=D)
    hidden = sum(sizes[:-1])
    for bits in itertools.product([0, 1], repeat=hidden):
        levels = [torch.tensor([root]), *list(torch.tensor(bits, dtype=torch.long).split(sizes[:-1]))]
        p = torch.ones((), dtype=D)
        for level in range(1, tree.depth):
            same = levels[level] == levels[level - 1].repeat_interleave(tree.branching)
            rho = tree.polarity[level - 1][run]
            p = p * torch.where(same, (1 + rho) / 2, (1 - rho) / 2).prod()
        same = patterns == levels[-1].repeat_interleave(tree.branching)
        rho = tree.polarity[-1][run]
        prob += p * torch.where(same, (1 + rho) / 2, (1 - rho) / 2).prod(1)
    return patterns, prob


def nce(anchor: torch.Tensor, positive: torch.Tensor, negative: torch.Tensor, tau: float) -> torch.Tensor:
    """InfoNCE of each sample as a cross entropy over two logits; rows [b, width]."""
    logits = torch.stack([-(anchor - other).square().sum(1) / 2 / tau for other in (positive, negative)], 1)
    return torch.nn.functional.cross_entropy(logits, torch.zeros(len(anchor), dtype=torch.long))


def batch_ratio(anchor: torch.Tensor, positive: torch.Tensor, negative: torch.Tensor, tau: float) -> torch.Tensor:
    """One ratio for the batch, of mean squared errors over samples and coordinates, no logarithm."""
    near, far = (torch.exp(-torch.nn.functional.mse_loss(anchor, other) / tau) for other in (positive, negative))
    return -near / (near + far)


@pytest.mark.parametrize("loss", [nce, batch_ratio])
@pytest.mark.parametrize(("depth", "width", "branching"), [(1, 3, 2), (3, 4, 2), (2, 2, 3)])
def test_step_equals_autograd(depth: int, width: int, branching: int, loss: Any) -> None:
    tree = HLTM(depth, 0.6, runs=3, branching=branching)
    fast = HLTMNetwork(depth, width, 3, branching).double()
    modules = [fast.to_module(run).double() for run in range(3)]  # an nn.Linear per node, one network at a time
    before = [p.clone() for p in fast.parameters()]
    for x in hltm.batches(tree, 4, 8, generator()):
        values = []
        for module, leaves in zip(modules, x.double(), strict=True):
            f = module(leaves.T)
            f = f / (f.norm(dim=1, keepdim=True) + 1e-4)
            value = loss(*f.split(8), 0.3)
            module.zero_grad()
            value.backward()
            torch.optim.SGD(module.parameters(), lr=0.2).step()
            values.append(value.detach())
        got = fast.step(x.double(), 0.2, 0.3, loss.__name__)
        torch.testing.assert_close(got, torch.stack(values), rtol=1e-12, atol=1e-12)
    slow = HLTMNetwork(depth, width, 3, branching).double()
    for run, module in enumerate(modules):
        slow.load_module(module, run)
    for a, b, start in zip(fast.parameters(), slow.parameters(), before, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
        assert not torch.equal(a, start)


def test_runs_are_independent() -> None:
    """Training three runs at once gives each what it gets alone on the same draws."""
    tree = HLTM(3, [0.6, 0.8, 0.9], runs=3)
    together = HLTMNetwork(3, 4, 3)
    alone = HLTMNetwork(3, 4, 1)
    for level in range(3):
        nodes = 2**level
        alone.weight[level].data.copy_(together.weight[level].data[nodes : 2 * nodes])
        alone.bias[level].data.copy_(together.bias[level].data[nodes : 2 * nodes])
    for x in hltm.batches(tree, 5, 16, generator()):
        together.step(x, 0.1, 0.1)
        alone.step(x[1:2].contiguous(), 0.1, 0.1)
    torch.testing.assert_close(together.weight[2][4:8], alone.weight[2], rtol=1e-5, atol=1e-6)


def test_default_initialisation_and_module_twin() -> None:
    network = HLTMNetwork(3, 6, 400)
    for level, fan_in in enumerate((12, 12, 2)):
        for p in (network.weight[level], network.bias[level]):
            assert p.abs().max() <= 1 / math.sqrt(fan_in)
            assert p.std().item() == pytest.approx(1 / math.sqrt(3 * fan_in), rel=0.03)
    x = HLTM(3, runs=400).sample(7, generator())[-1].float()
    tree = network.to_module(5)
    torch.testing.assert_close(tree(x[5].T).T, network(x)[5], rtol=1e-5, atol=1e-6)
    assert {n for n, _ in tree.nodes.named_children()} == {"root", "s0", "s1", "s00", "s01", "s10", "s11"}


def test_resume_continues_as_if_never_stopped() -> None:
    tree, whole, parts = HLTM(3, runs=2), HLTMNetwork(3, 3, 2), HLTMNetwork(3, 3, 2)
    hltm.train(whole, tree, epochs=3, draws=640)
    hltm.train(parts, tree, epochs=1, draws=640)
    hltm.train(parts, tree, epochs=3, draws=640, start_epoch=1)
    assert torch.equal(whole.weight[0], parts.weight[0])


def test_normalized_correlation_against_numpy() -> None:
    import numpy as np

    tree, network = HLTM(3, 0.8, runs=2), HLTMNetwork(3, 3, 2)
    network.weight[1].data[0, 0] = 0.0  # a unit without variance counts 0, not NaN
    got = hltm.normalized_correlation(network, tree, ["root", "s0", "s01"], generator(), samples=2048)
    levels = tree.sample(2048, generator())
    units = network.preactivations(levels[-1].float())
    for name, (level, index) in {"root": (0, 0), "s0": (1, 0), "s01": (2, 1)}.items():
        for run in range(2):
            z = levels[level][run, index].numpy()
            f = units[level][run, index].detach().numpy()
            best = max(abs(np.corrcoef(z, u)[0, 1]) if u.std() > 1e-6 else 0.0 for u in f)
            assert got[name][run].item() == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize("latent", ["root", "s1", "s01"])
def test_covariance_operator_against_enumeration(latent: str) -> None:
    """Exact over all leaves, with Jacobians by autograd, vec(W) column-major."""
    tree = HLTM(3, 0.5, root_polarity=0.2)
    network = HLTMNetwork(3, 3).double()
    module = network.to_module().double()
    weight = module.nodes[latent].weight.detach()

    def output(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return functional_call(module, {f"nodes.{latent}.weight": w}, (x[None],))[0]

    means = []
    for root in (0, 1):
        patterns, prob = leaf_law(tree, 0, root)
        assert prob.sum().item() == pytest.approx(1)
        jac = vmap(jacrev(output), (None, 0))(weight, patterns.double())  # [n, out, width, fan_in]
        means.append(torch.einsum("n,nauk->kua", prob, jac).flatten(0, 1))
    gap = means[1] - means[0]
    exact = 0.4 * 0.6 * gap @ gap.T
    sampled = hltm.covariance_operator(network, tree, latent, generator(), samples=60_000)[0]
    assert (sampled - exact).norm() < 0.03 * exact.norm()
    norm = hltm.covariance_operator_norm(network, tree, [latent], generator(), samples=60_000)[latent]
    torch.testing.assert_close(norm[0], sampled.norm())


@pytest.mark.parametrize(("latent", "values"), [("s01", "01"), ("s01", "+-1"), ("s0", "01")])
def test_theorem_6_against_enumeration_and_sampling(latent: str, values: str) -> None:
    tree = HLTM(3, 0.6, root_polarity=-0.4)
    network = HLTMNetwork(3, 3, seed=3).double()
    level = len(latent) - 1
    children = [latent + "0", latent + "1"]
    s = torch.cat([hltm.selectivity(network, tree, c, generator(), 400_000, values) for c in children], dim=1)
    analytic = hltm.analytic_activation_covariance(tree, latent, s)[0]
    means = []
    for root in (0, 1):
        patterns, prob = leaf_law(tree, 0, root)
        x = tree.observe(patterns.T[None].to(torch.uint8), values, D)
        f = x[0, 2:4] if level == 2 else network.preactivations(x)[2][0, :2].relu().flatten(0, 1).detach()
        means.append(f @ prob)
    gap = means[1] - means[0]
    exact = (1 - 0.4**2) / 4 * gap[:, None] * gap[None, :]
    assert (analytic - exact).norm() < 0.02 * exact.norm()
    if level == 2:  # leaves are selective by definition, so here the theorem is exact
        leaf = torch.full((1, 2), 1.0 if values == "+-1" else 0.5, dtype=D)
        torch.testing.assert_close(hltm.analytic_activation_covariance(tree, latent, leaf)[0], exact)


def test_theorem_6_gives_the_sampled_operator_where_the_jacobian_is_constant() -> None:
    """Open gates: OP = (V_{z0}[E[f_ch | z0]]) (x) J^T J, at the lowest layer exactly what sampling finds."""
    tree = HLTM(2, 0.6, root_polarity=0.3)
    network = HLTMNetwork(2, 3, seed=2).double()
    network.bias[1].data += 5.0  # no input closes a unit
    leaf = torch.full((1, 2), 0.5, dtype=D)
    activation = hltm.analytic_activation_covariance(tree, "s1", leaf)[0]
    jacobian = network.weight[0].detach()[0][:, 3:]  # the root's weights on the units of s1
    analytic = torch.kron(activation, jacobian.T @ jacobian)
    sampled = hltm.covariance_operator(network, tree, "s1", generator(), samples=200_000)[0]
    assert analytic.norm() > 0 and (sampled - analytic).norm() < 0.02 * analytic.norm()


def test_a_node_without_active_units_has_no_operator_ever() -> None:
    """No gradient passes it: training changes neither it nor what is below, and leaves the rest to learn."""
    tree, network = HLTM(3, 0.9), HLTMNetwork(3, 4, seed=1)
    network.bias[1].data[1] = -10.0  # s1
    before = [w.clone() for w in network.weight]
    norms = hltm.covariance_operator_norm(network, tree, ["s0", "s1", "s10"], generator(), 256)
    assert norms["s0"] > 0 and norms["s1"] == 0 and norms["s10"] == 0
    hltm.train(network, tree, epochs=1, draws=12_800)
    norms = hltm.covariance_operator_norm(network, tree, ["s0", "s1", "s10"], generator(), 256)
    assert norms["s0"] > 0 and norms["s1"] == 0 and norms["s10"] == 0
    assert torch.equal(network.weight[1][1], before[1][1]) and torch.equal(network.weight[2][2:], before[2][2:])
    assert not torch.equal(network.weight[2][:2], before[2][:2])


def test_root_has_the_largest_activation_covariance() -> None:
    """The corrected o_mu is 1 at the root; the one printed in DDN-v2 would be 0 there."""
    tree = HLTM(3, 0.7)
    ones = torch.ones(1, 2, dtype=D)
    at_root = hltm.analytic_activation_covariance(tree, "root", ones)[0]
    rho = tree.polarity[0][0]
    torch.testing.assert_close(at_root, rho[:, None] * rho[None, :])


def test_lucky_nodes_on_the_lowest_layer() -> None:
    """With the theorem's number of units, a lucky one exists at least as often as promised."""
    children, c, failure = 40, 1.0, 0.3
    tree = HLTM(1, 0.9, branching=children, signed=True)
    mean, a = torch.full((children,), 0.5, dtype=D), tree.polarity[0][0] * 0.5
    width = math.ceil(hltm.lucky_nodes(mean, a, c, failure))
    trials = 2000
    w = (torch.rand(trials, width, children, generator=generator(), dtype=D) * 2 - 1) * math.sqrt(3 / children)
    high, low = w @ (mean + a), w @ (mean - a)
    lucky = (high >= math.sqrt(c / children) * (mean + a).norm()) & (low < 0)
    assert lucky.any(1).double().mean() >= 1 - failure
    assert torch.all(((high - low) / 2 - w @ a).abs() < 1e-12)  # the gap is 2 w^T a
    # The bound is not vacuous: a few units are not enough.
    assert lucky[:, :2].any(1).double().mean() < 1 - failure


def test_learns_and_operator_grows() -> None:
    tree = HLTM(4, 0.9, runs=6)
    network = HLTMNetwork(4, 8, 6)
    before = hltm.normalized_correlation(network, tree, ["root"], generator())["root"]
    norm = hltm.covariance_operator_norm(network, tree, ["s0"], generator(), 512)["s0"]
    hltm.train(network, tree, epochs=1, draws=64_000 // 2)
    after = hltm.normalized_correlation(network, tree, ["root"], generator())["root"]
    assert after.mean() > before.mean() + 0.03
    assert hltm.covariance_operator_norm(network, tree, ["s0"], generator(), 512)["s0"].median() > norm.median()


def test_categorical_tree_trains() -> None:
    tree = HLTM(3, 0.9, states=4, runs=2)
    network = HLTMNetwork(3, 8, 2, leaf_width=4)
    before = hltm.normalized_correlation(network, tree, ["root"], generator(), values="onehot")["root"]
    hltm.train(network, tree, epochs=1, draws=32_000, values="onehot")
    after = hltm.normalized_correlation(network, tree, ["root"], generator(), values="onehot")["root"]
    assert after.mean() > before.mean()
    norm = hltm.covariance_operator_norm(network, tree, ["s0"], generator(), 256, "onehot")["s0"]
    assert torch.isfinite(norm).all()


def test_refuses_bad_input() -> None:
    with pytest.raises(ValueError, match="`depth` must be at least 1, got 0"):
        HLTMNetwork(depth=0)
    with pytest.raises(ValueError, match="make them equal"):
        hltm.train(HLTMNetwork(3, 2, 1), HLTM(4))
    with pytest.raises(ValueError, match=r"`loss` must .*'nce', 'batch_ratio'.*got 'log'"):
        hltm.train(HLTMNetwork(3, 2, 1), HLTM(3), loss="log")
    with pytest.raises(ValueError, match=r"`tau` and `lr` must be positive, got 0"):
        hltm.train(HLTMNetwork(3, 2, 1), HLTM(3), tau=0)
    with pytest.raises(ValueError, match="`latent` must be an internal node"):
        hltm.covariance_operator(HLTMNetwork(3, 2, 1), HLTM(3), "s010", generator())
    with pytest.raises(ValueError, match="`latent` must be a path"):
        hltm.covariance_operator(HLTMNetwork(3, 2, 1), HLTM(3), "s02", generator())


@pytest.mark.parametrize("c", [0.5, 2.0, 3.0])
def test_lucky_units_are_as_selective_as_theorem_5_says(c: float) -> None:
    """Eq. 130 on the lowest layer, by enumerating the leaves: children are the leaves themselves, s = 1/2."""
    n, sigma_w = 8, 0.6
    generator = torch.Generator().manual_seed(0)
    configurations = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * n)
    found = positive = 0
    for _ in range(8):
        polarity = 0.9 + 0.1 * torch.rand(n, generator=generator, dtype=torch.float64)
        polarity[5:] *= -1  # leaves that are off where the latent is on; fewer than half
        on = (1 + polarity) / 2
        likelihood = {z: torch.where(configurations > 0, p, 1 - p).prod(1) for z, p in ((1, on), (0, 1 - on))}
        w = (2 * torch.rand(20_000, n, generator=generator, dtype=torch.float64) - 1) * sigma_w * (3 / n) ** 0.5
        lucky = (w @ on >= (c / n) ** 0.5 * sigma_w * on.norm()) & (w @ (1 - on) < 0)
        w = w[lucky]
        activation = (configurations @ w.T).relu()  # [2^n, units]
        one, zero = likelihood[1] @ activation, likelihood[0] @ activation
        bound = hltm.selectivity_bound(
            torch.full((n,), 0.5, dtype=torch.float64), polarity, (one + zero) / 2, c, sigma_w
        )
        assert bool(((one - zero) / 2 >= bound).all())
        found += len(w)
        positive += int((bound > 0).sum())
    assert found > 500 and positive > 100  # the bound says something

"""Deep ReLU networks on hierarchical latent trees: many independent runs trained at once (DDN-v2 Sec. 6, D.1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from lightning_ssl.data.synthetic import HLTM, latent_position

__all__ = [
    "HLTM",
    "HLTMNetwork",
    "HLTMTree",
    "analytic_activation_covariance",
    "covariance_operator",
    "covariance_operator_norm",
    "lucky_nodes",
    "normalized_correlation",
    "selectivity",
    "selectivity_bound",
    "train",
]

NORM_EPS = 1e-4
LOSSES = ("nce", "batch_ratio")


class HLTMNetwork(nn.Module):
    r"""One ReLU network per tree, each node a linear map of its children's units, all trees in each matmul.

    Node :math:`\mu` has ``width`` = :math:`|N_\mu|` units, :math:`\tilde f_\mu = W_\mu f_{ch(\mu)} + b_\mu`,
    :math:`f_\mu = ReLU(\tilde f_\mu)`; the root's pre-activation is the output. PyTorch's default initialisation,
    no normalisation layers.

    Samples are the last axis everywhere: then a node's input, the concatenation of its children, is a view, and
    the products are of the shape CPUs multiply fastest.

    Args:
        depth: Levels of edges of the trees.
        width: Units of each internal node.
        runs: Number of independent networks.
        branching: Children of a node.
        leaf_width: Features of a leaf (``states`` for one-hot leaves).
        seed: Seed of the initialisation.
    """

    def __init__(
        self, depth: int = 5, width: int = 10, runs: int = 1, branching: int = 2, leaf_width: int = 1, seed: int = 0
    ) -> None:
        super().__init__()
        for name, value in (("depth", depth), ("width", width), ("runs", runs), ("leaf_width", leaf_width)):
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}")
        self.depth, self.width, self.runs, self.branching, self.leaf_width = depth, width, runs, branching, leaf_width
        generator = torch.Generator().manual_seed(seed)
        weights, biases = [], []
        for level in range(depth):  # level 0 is the root
            nodes, fan_in = branching**level, branching * (leaf_width if level == depth - 1 else width)
            bound = 1 / math.sqrt(fan_in)  # nn.Linear's default, weight and bias alike
            weights.append(torch.rand(runs * nodes, width, fan_in, generator=generator) * 2 * bound - bound)
            biases.append(torch.rand(runs * nodes, width, 1, generator=generator) * 2 * bound - bound)
        self.weight = nn.ParameterList(weights)  # [runs * nodes, width, fan_in]
        self.bias = nn.ParameterList(biases)  # [runs * nodes, width, 1]
        self._scratch: list[tuple[Tensor, Tensor]] | None = None

    def preactivations(self, x: Tensor) -> list[Tensor]:
        """Of each internal level, root first: ``[runs, leaves * leaf_width, n]`` -> ``[runs, nodes, width, n]``."""
        n, out = x.shape[-1], []
        inputs = x
        for level in reversed(range(self.depth)):
            nodes = self.branching**level
            h = inputs.reshape(self.runs * nodes, -1, n)
            f = torch.baddbmm(self.bias[level], self.weight[level], h)
            out.append(f.view(self.runs, nodes, self.width, n))
            inputs = f.relu()
        return out[::-1]

    def forward(self, x: Tensor) -> Tensor:
        """Un-normalised outputs ``[runs, width, n]`` of ``[runs, leaves * leaf_width, n]``."""
        return self.preactivations(x)[0][:, 0]

    @torch.no_grad()
    def step(self, x: Tensor, lr: float, tau: float, loss: str = "nce") -> Tensor:
        """One SGD step with H = 1 on columns [anchor | positive | negative]; returns the loss, ``[runs]``.

        The same numbers as autograd, without its bookkeeping: the backward pass of a tree is two products a level.
        For ``loss`` see :func:`train`.
        """
        n = x.shape[-1]
        if self._scratch is None or self._scratch[0][0].shape[-1] != n or self._scratch[0][0].dtype != x.dtype:
            sizes = [self.runs * self.branching**level for level in range(self.depth)]
            # Kept between steps: fresh memory of this size would cost more (page faults) than the arithmetic.
            self._scratch = [(x.new_empty(size, self.width, n), x.new_empty(size, self.width, n)) for size in sizes]
        inputs: list[Tensor] = []  # of each level, leaves first
        h = x
        for level in reversed(range(self.depth)):
            h = h.view(self.runs * self.branching**level, -1, n)
            inputs.append(h)
            f = torch.baddbmm(self.bias[level], self.weight[level], h, out=self._scratch[level][0])
            h = f.relu_() if level else f
        value, grad = _contrastive_gradient(f.view(self.runs, self.width, 3, n // 3), tau, loss)
        grad = grad.view(self.runs, self.width, n)
        for level in range(self.depth):
            h, weight = inputs.pop(), self.weight[level].data
            if level < self.depth - 1:
                below = self._scratch[level + 1][1].view_as(h)
                torch.bmm(weight.transpose(1, 2), grad, out=below)
                # h = ReLU(pre-activation) is positive exactly where the unit passes gradient.
                torch.ops.aten.threshold_backward.grad_input(below, h, 0, grad_input=below)
            weight.baddbmm_(grad, h.transpose(1, 2), alpha=-lr)
            self.bias[level].data.sub_(grad.sum(-1, keepdim=True), alpha=lr)
            grad = self._scratch[level + 1][1] if level < self.depth - 1 else grad
        return value

    def to_module(self, run: int = 0) -> HLTMTree:
        """One of the networks as an ordinary module of ``nn.Linear`` nodes."""
        tree = HLTMTree(self.depth, self.width, self.branching, self.leaf_width)
        with torch.no_grad():
            for name, linear in tree.nodes.items():
                level, index = latent_position(name, self.branching)
                row = run * self.branching**level + index
                linear.weight.copy_(self.weight[level][row])  # type: ignore[operator]
                linear.bias.copy_(self.bias[level][row, :, 0])  # type: ignore[operator]
        return tree

    @torch.no_grad()
    def load_module(self, tree: HLTMTree, run: int = 0) -> None:
        """Take a module's weights as those of one run: the reverse of :meth:`to_module`."""
        for name, linear in tree.nodes.items():
            level, index = latent_position(name, self.branching)
            row = run * self.branching**level + index
            self.weight[level][row] = linear.weight
            self.bias[level][row, :, 0] = linear.bias


class HLTMTree(nn.Module):
    """The network of one tree with an ``nn.Linear`` per node, named by its latent: a backbone for any method.

    ``forward`` maps ``[batch, leaves * leaf_width]`` to the root's un-normalised ``[batch, width]``.

    Args:
        depth: Levels of edges of the tree.
        width: Units of each internal node.
        branching: Children of a node.
        leaf_width: Features of a leaf.
    """

    def __init__(self, depth: int = 5, width: int = 10, branching: int = 2, leaf_width: int = 1) -> None:
        super().__init__()
        if depth < 1 or width < 1:
            raise ValueError(f"`depth` and `width` must be at least 1, got {depth} and {width}")
        self.depth, self.branching, self.out_features = depth, branching, width
        self.nodes = nn.ModuleDict()
        for level in range(depth):
            fan_in = branching * (leaf_width if level == depth - 1 else width)
            for index in range(branching**level):
                self.nodes[latent_name(level, index, branching)] = nn.Linear(fan_in, width)

    def forward(self, x: Tensor) -> Tensor:
        """The root's un-normalised output."""
        children = list(x.flatten(1).chunk(self.branching**self.depth, dim=1))
        for level in reversed(range(self.depth)):
            parents = []
            for index in range(self.branching**level):
                inputs = torch.cat(children[index * self.branching : (index + 1) * self.branching], dim=1)
                parents.append(self.nodes[latent_name(level, index, self.branching)](inputs))
            children = [p.relu() for p in parents] if level else parents
        return children[0]


def latent_name(level: int, index: int, branching: int = 2) -> str:
    """The path of a latent: 'root', 's0', 's010'."""
    digits = []
    for _ in range(level):
        index, digit = divmod(index, branching)
        digits.append(str(digit))
    return "s" + "".join(reversed(digits)) if level else "root"


def _contrastive_gradient(f: Tensor, tau: float, loss: str) -> tuple[Tensor, Tensor]:
    """Loss ``[runs]`` of f / (|f| + eps), as in :func:`train`, and its gradient, for f ``[runs, width, 3, b]``."""
    norm = f.square().sum(1, keepdim=True).sqrt_()
    g = f / (norm + NORM_EPS)
    anchor, positive, negative = g.unbind(2)
    b = anchor.shape[-1]
    gap = (anchor - positive).square().sum(1) - (anchor - negative).square().sum(1)  # 2 (r+ - r-), [runs, b]
    if loss == "nce":
        margin = gap / (2 * tau)
        # -log softmax of two terms is softplus(margin), whose derivative is the sigmoid.
        value, xi = nn.functional.softplus(margin).mean(-1), torch.sigmoid(margin) / (tau * b)
    else:
        share = torch.sigmoid(-gap.mean(-1, keepdim=True) / (f.shape[1] * tau))  # of the positives, one for the batch
        value, xi = -share[:, 0], 2 * share * (1 - share) / (f.shape[1] * tau * b)
    xi = xi.unsqueeze(1)
    dg = torch.stack([(negative - positive) * xi, (positive - anchor) * xi, (anchor - negative) * xi], dim=2)
    radial = (dg * f).sum(1, keepdim=True) / (norm.clamp_min(1e-30) * (norm + NORM_EPS).square())
    return value, dg / (norm + NORM_EPS) - f * radial


def batches(
    tree: HLTM, steps: int, batch_size: int, generator: torch.Generator, values: str = "01"
) -> Iterator[Tensor]:
    """Columns [anchor | positive | negative] for each step: positives redraw the tree under the anchor's root."""
    chunk = max(1, min(steps, 2_000_000 // (tree.runs * tree.leaves * batch_size)))
    for start in range(0, steps, chunk):
        k = min(chunk, steps - start)
        root = tree.sample_root(2 * k * batch_size, generator)
        anchor_root, negative_root = root.chunk(2, dim=-1)
        leaves = tree.sample(3 * k * batch_size, generator, torch.cat([anchor_root, anchor_root, negative_root], -1))[
            -1
        ]
        leaves = leaves.unflatten(-1, (3, k, batch_size))
        for i in range(k):
            yield tree.observe(leaves[..., i, :].flatten(-2), values)


def train(
    network: HLTMNetwork,
    tree: HLTM,
    epochs: int = 50,
    draws: int = 64_000,
    batch_size: int = 128,
    lr: float = 0.1,
    tau: float = 0.1,
    loss: str = "nce",
    seed: int = 0,
    values: str = "01",
    start_epoch: int = 0,
    on_epoch: Callable[[int, Tensor], None] | None = None,
) -> HLTMNetwork:
    r"""Train all runs by SGD on fresh draws, as the published experiments do (D.1).

    An epoch's draws depend on (seed, epoch) alone, so training can be resumed with ``start_epoch``.
    ``on_epoch(epoch, loss)`` is called after each epoch, counted from 1, with the mean loss of each run.

    Losses, of l2-normalised outputs with one negative:

    - "nce": InfoNCE of each sample, :math:`\log(1 + e^{(r_+ - r_-)/\tau})`, :math:`r = |x - y|^2 / 2` (DDN-v2 Eq. 2);
    - "batch_ratio": what the authors' released code minimises, :math:`-1 / (1 + e^{(d_+ - d_-)/\tau})` with d the mean
      of :math:`(x - y)^2` over the batch and the coordinates: no logarithm, one number a batch, so smaller steps that
      fade as the classes part.
    """
    if network.runs != tree.runs or network.depth != tree.depth:
        raise ValueError(
            f"`network` must have the tree's runs and depth, {tree.runs} and {tree.depth}, got {network.runs} and "
            f"{network.depth}; make them equal"
        )
    if tau <= 0 or lr <= 0:
        raise ValueError(f"`tau` and `lr` must be positive, got {tau} and {lr}")
    if loss not in LOSSES:
        raise ValueError(f"`loss` must be one of {LOSSES}, got {loss!r}")
    steps = max(1, draws // batch_size)
    for epoch in range(start_epoch, epochs):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        total = torch.zeros(network.runs)
        for x in batches(tree, steps, batch_size, generator, values):
            total += network.step(x, lr, tau, loss)
        if on_epoch is not None:
            on_epoch(epoch + 1, total / steps)
    return network


@torch.no_grad()
def normalized_correlation(
    network: HLTMNetwork,
    tree: HLTM,
    latents: Sequence[str],
    generator: torch.Generator,
    samples: int = 16_384,
    values: str = "01",
) -> dict[str, Tensor]:
    r"""max over the units j of a node of :math:`|corr(z_\mu, \tilde f_j)|`, for each run ``[runs]``.

    Pre-activations are used (the root's is the un-normalised output); a unit without variance counts 0. With more
    than two states, z is replaced by the indicator of each state and the maximum runs over these too.
    """
    positions = {name: _internal_position(network, name) for name in latents}
    first = 1 if tree.states == 2 else 0  # a binary latent is its own indicator
    states = tree.states - first
    sums: dict[str, Tensor] = {}
    for start in range(0, samples, 2048):
        n = min(2048, samples - start)
        levels = tree.sample(n, generator)
        units = network.preactivations(tree.observe(levels[-1], values, network.weight[0].dtype))
        for name, (level, index) in positions.items():
            z = levels[level][:, index].long()
            z = nn.functional.one_hot(z, tree.states)[..., first:].movedim(-1, 1).double()  # [runs, states, n]
            both = torch.cat([torch.ones_like(z[:, :1]), z, units[level][:, index].double()], dim=1)
            # Second moments of (1, z, units): all that Pearson's coefficient needs.
            sums[name] = sums.get(name, 0) + both @ both.transpose(1, 2)
    out = {}
    for name, moment in sums.items():
        mean = moment[:, 0, 1:] / samples
        cov = moment[:, 1:, 1:] / samples - mean[:, :, None] * mean[:, None, :]
        scale = cov.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()
        alive = scale > 1e-6 * (moment[:, 1:, 1:].diagonal(dim1=1, dim2=2) / samples).sqrt()
        corr = cov / (scale[:, :, None] * scale[:, None, :]).clamp_min(1e-300)
        corr = torch.where(alive[:, :, None] & alive[:, None, :], corr.abs(), torch.zeros_like(corr))
        out[name] = corr[:, :states, states:].amax(dim=(1, 2))
    return out


@torch.no_grad()
def covariance_operator(
    network: HLTMNetwork,
    tree: HLTM,
    latent: str,
    generator: torch.Generator,
    samples: int = 2048,
    values: str = "01",
) -> Tensor:
    r"""The sampled operator of a node: :math:`OP_\mu = V_{z_0}[E[f_{ch(\mu)} \otimes J_\mu^T | z_0]]`, per run.

    Equals the covariance of the Jacobian of the un-normalised output with respect to vec(W_mu) (column-major).

    Args:
        network: The networks.
        tree: Their trees.
        latent: The node, e.g. "s010".
        generator: Source of the draws.
        samples: Draws for each value of the root.
        values: What the network sees of the leaves.

    Returns:
        ``[runs, width * fan_in, width * fan_in]``.
    """
    mean = _root_conditional_connection(network, tree, latent, generator, samples, values)  # [states, runs, P, n_L]
    centred = mean - (_root_probability(tree, mean) * mean).sum(0)
    weighted = centred * _root_probability(tree, mean).sqrt()
    flat = weighted.movedim(0, -1).flatten(2)  # [runs, P, n_L * states]
    return flat @ flat.transpose(1, 2)


def covariance_operator_norm(
    network: HLTMNetwork,
    tree: HLTM,
    latents: Sequence[str],
    generator: torch.Generator,
    samples: int = 2048,
    values: str = "01",
) -> dict[str, Tensor]:
    """Frobenius norm of each node's :func:`covariance_operator`, ``[runs]``."""
    return {
        name: covariance_operator(network, tree, name, generator, samples, values).flatten(1).norm(dim=1)
        for name in latents
    }


@torch.no_grad()
def _root_conditional_connection(
    network: HLTMNetwork, tree: HLTM, latent: str, generator: torch.Generator, samples: int, values: str
) -> Tensor:
    """E[f_ch (x) J^T | z0 = j] for each j: ``[states, runs, fan_in * width, width]``."""
    level, index = _internal_position(network, latent)
    runs, width, b = network.runs, network.width, network.branching
    means = []
    for state in range(tree.states):
        total: Tensor | float = 0.0
        for start in range(0, samples, 1024):
            n = min(1024, samples - start)
            root = torch.full((runs, 1, n), state, dtype=torch.uint8)
            x = tree.observe(tree.sample(n, generator, root)[-1], values, network.weight[0].dtype)
            units = network.preactivations(x)
            # J = d output / d pre-activation of the node, down the path from the root: [runs, width_out, width, n].
            jacobian = torch.eye(width, dtype=x.dtype)[None, :, :, None].expand(runs, -1, -1, n)
            for l in range(1, level + 1):
                node, parent = index // b ** (level - l), index // b ** (level - l + 1)
                weight = network.weight[l - 1].view(runs, -1, width, b, width)[:, parent, :, node % b]
                jacobian = torch.einsum("raun,ruv->ravn", jacobian, weight) * (units[l][:, node] > 0).unsqueeze(1)
            below = x if level == network.depth - 1 else units[level + 1].relu()
            inputs = below.reshape(runs, b**level, -1, n)[:, index]  # [runs, fan_in, n]
            total = total + torch.einsum("rkn,raun->rkua", inputs, jacobian).flatten(1, 2)
        means.append(total / samples)
    return torch.stack(means)  # type: ignore[arg-type]


def _root_probability(tree: HLTM, like: Tensor) -> Tensor:
    """P(z0 = j), shaped to weight ``[states, ...]``."""
    p = torch.full((tree.states,), 1 / tree.states, dtype=like.dtype)
    if tree.states == 2:
        p = torch.tensor([(1 - tree.root_polarity) / 2, (1 + tree.root_polarity) / 2], dtype=like.dtype)
    return p.view(-1, *[1] * (like.dim() - 1))


@torch.no_grad()
def selectivity(
    network: HLTMNetwork, tree: HLTM, latent: str, generator: torch.Generator, samples: int = 16_384, values: str = "01"
) -> Tensor:
    r"""s_k = (E[f_k | z=1] - E[f_k | z=0]) / 2 of a binary latent's units, ``[runs, width]`` (leaf: ``[runs, 1]``)."""
    level, index = latent_position(latent, tree.branching)
    levels = tree.sample(samples, generator)
    x = tree.observe(levels[-1], values, network.weight[0].dtype)
    units = x[:, index : index + 1] if level == tree.depth else network.preactivations(x)[level][:, index].relu()
    z = levels[level][:, index].to(units.dtype)  # [runs, n]
    one = torch.einsum("run,rn->ru", units, z) / z.sum(-1, keepdim=True)
    zero = torch.einsum("run,rn->ru", units, 1 - z) / (1 - z).sum(-1, keepdim=True)
    return (one - zero) / 2


def analytic_activation_covariance(tree: HLTM, latent: str, child_selectivity: Tensor) -> Tensor:
    r"""V_{z0}[E[f_ch | z0]] = o a a^T with :math:`o = \rho_{0\mu}^2 (1 - \rho_0^2)` (DDN-v1 Theorem 6).

    DDN-v2 prints :math:`1 - \rho_{0\mu}^2`, which its own Eq. 179 contradicts and which would give 0 at the root.
    With a constant Jacobian the node's operator is this matrix ``(x)`` J^T J.

    Args:
        tree: Binary trees.
        latent: The node mu.
        child_selectivity: s_k of the children's units, children in order, ``[runs, branching * units]``.

    Returns:
        ``[runs, branching * units, branching * units]``.
    """
    level, index = latent_position(latent, tree.branching)
    b = tree.branching
    if tree.states != 2 or child_selectivity.shape[1] % b:
        raise ValueError("`tree` must be binary (Theorem 6), and `child_selectivity` hold equally many units a child")
    rho = tree.polarity[level][:, index * b : (index + 1) * b].to(child_selectivity)
    a = rho.repeat_interleave(child_selectivity.shape[1] // b, dim=1) * child_selectivity
    o = tree.root_polarities(latent).to(a).square() * (1 - tree.root_polarity**2)
    return o[:, None, None] * a[:, :, None] * a[:, None, :]


def lucky_nodes(mean: Tensor, a: Tensor, c: float, failure: float) -> float:
    r"""Units a node needs for a lucky one at initialisation with probability 1 - ``failure`` (DDN-v2 Theorem 5).

    :math:`|N_\mu| \ge 2\pi e^{c/2} \ln(1/\eta) / (\sqrt{1 - \gamma^2} \hat R(c, \gamma))`, Eqs. 121, 128, 129. A lucky
    unit has pre-activation means above :math:`\sqrt{c}` standard deviations for z = 1 and below 0 for z = 0. The
    theorem's variance step needs independent children: hold it to the lowest layer.

    Args:
        mean: Mean activation of the children, ``[children]``.
        a: Polarity x selectivity of the children, ``[children]``.
        c: How far from zero the lucky unit shall be, squared.
        failure: Allowed probability eta that there is none.
    """
    if c < 0 or not 0 < failure < 1:
        raise ValueError(f"`c` must not be negative and `failure` lie in (0, 1), got {c} and {failure}")
    mean, a = mean.double(), a.double()
    gamma = float((mean.square().sum() - a.square().sum()) / ((mean - a).norm() * (mean + a).norm()))
    kappa1 = math.sqrt(c / (1 - gamma**2))
    kappa2 = gamma * kappa1

    def mills(y: float) -> float:
        return math.sqrt(math.pi / 2) * float(torch.special.erfcx(torch.tensor(y / math.sqrt(2), dtype=torch.float64)))

    def excess(y: float) -> float:
        return 1 / mills(y) - y

    ratio = max(
        mills(kappa1) * mills(kappa2 + gamma * excess(kappa1)), mills(kappa2) * mills(kappa1 + gamma * excess(kappa2))
    )
    return 2 * math.pi * math.exp(c / 2) / (math.sqrt(1 - gamma**2) * ratio) * math.log(1 / failure)


def selectivity_bound(
    child_selectivity: Tensor, polarity: Tensor, mean: Tensor, c: float, sigma_w: float, within: float = 0.0
) -> Tensor:
    r"""How selective a lucky unit is at least (DDN-v2 Theorem 5, Eq. 130).

    .. math:: |s_j| \ge \frac{3 \sigma_w^2}{4 \bar v_j} \Big[\frac1n \sum_k s_k^2
        \big(\tfrac{c + 6}{6} \rho_k^2 - 1\big) - \sigma_l^2\Big]

    for a unit without bias whose pre-activation's mean is at least :math:`\sqrt{c / n} \sigma_w |u^+|` for z = 1 and
    below 0 for z = 0, where :math:`u^+` are the children's mean activations for z = 1; weights drawn from
    :math:`\pm \sigma_w \sqrt{3 / n}`, and the children with :math:`\rho_k s_k \ge 0` holding at least half of
    :math:`\sum_k \rho_k^2 s_k^2`.

    Args:
        child_selectivity: s_k of the n children, ``[n]``.
        polarity: rho_k between the node's latent and each child's, ``[n]``.
        mean: :math:`\bar v_j`, the unit's mean activation over both values of the latent, any shape.
        c: How lucky the unit is, see :func:`lucky_nodes`.
        sigma_w: Scale of the initialisation; PyTorch's default is 1 / sqrt(3).
        within: :math:`\sigma_l^2`, the largest variance of a child's activation given its own latent; 0 for leaves.
    """
    gain = (child_selectivity.square() * ((c + 6) / 6 * polarity.square() - 1)).mean() - within
    return 3 * sigma_w**2 / (4 * mean) * gain


def _internal_position(network: HLTMNetwork, name: str) -> tuple[int, int]:
    level, index = latent_position(name, network.branching)
    if level >= network.depth:
        raise ValueError(f"`latent` must be an internal node of a tree of depth {network.depth}, got {name!r}")
    return level, index

"""An epoch of latent-tree training (DDN-v2 Sec. 5): 64,000 triplets of depth-5 trees, InfoNCE, batches of 128, SGD.

Against the published algorithm: every node of every sample drawn on its own from its parent's row of a conditional
table (`torch.multinomial`), an `nn.Linear` a node, autograd, one run after the other; and against the same with the
draws in plain Python, the fastest way to go sample by sample. Ours draws and trains the 30 runs of a table at once. The
slow sides are timed on five steps and scaled to 30 epochs. Asserted: the same leaves in distribution, and the
same weights after a step from the same batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks._bench import Section, faster, main, race
from lightning_ssl.theory import hltm

DRAWS, BATCH, DEPTH, LR, TAU = 64_000, 128, 5, 0.1, 0.1


def in_python(polarity: list[list[float]], root: int) -> list[int]:
    """One tree below a root, node by node: a child takes its parent's value with probability (1 + rho) / 2."""
    values = [root]
    for level in polarity:
        values = [
            values[i // 2] if random.random() < (1 + rho) / 2 else 1 - values[i // 2] for i, rho in enumerate(level)
        ]
    return values


def by_multinomial(tables: list[list[Tensor]], root: int) -> list[int]:
    """The same from conditional tables [parent, child]."""
    values = [root]
    for level in tables:
        values = [int(torch.multinomial(table[values[i // 2]], 1)) for i, table in enumerate(level)]
    return values


def tables_of(polarity: list[list[float]]) -> list[list[Tensor]]:
    return [[torch.tensor([[1 + rho, 1 - rho], [1 - rho, 1 + rho]]) / 2 for rho in level] for level in polarity]


def slow_batch(draw: Callable[..., list[int]], tree: list, size: int) -> Tensor:
    """[anchor | positive | negative], each of `size` rows."""
    roots = [random.randrange(2) for _ in range(size)]
    parts = [roots, roots, [random.randrange(2) for _ in range(size)]]
    return torch.tensor([draw(tree, root) for part in parts for root in part], dtype=torch.float32)


def slow_step(module: torch.nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    f = module(x)
    f = f / (f.norm(dim=1, keepdim=True) + hltm.NORM_EPS)
    anchor, positive, negative = f.chunk(3)
    gap = ((anchor - positive).square().sum(1) - (anchor - negative).square().sum(1)) / 2
    optimizer.zero_grad()
    torch.nn.functional.softplus(gap / TAU).mean().backward()
    optimizer.step()


def check(width: int, samples: int) -> None:
    tree, network = hltm.HLTM(DEPTH, 0.7), hltm.HLTMNetwork(DEPTH, width)
    polarity = [level[0].tolist() for level in tree.polarity]
    fast = next(iter(hltm.batches(tree, 1, 4 * samples, torch.Generator().manual_seed(0))))[0].T
    tolerance = 4 / samples**0.5
    for slow in (slow_batch(in_python, polarity, samples), slow_batch(by_multinomial, tables_of(polarity), samples)):
        for a, b in zip(slow.chunk(3), fast.chunk(3), strict=True):
            assert (a.T.cov() - b.T.cov()).abs().max() < tolerance / 2 and (
                a.mean(0) - b.mean(0)
            ).abs().max() < tolerance
    module = network.to_module()
    slow_step(module, torch.optim.SGD(module.parameters(), LR), slow[:300])
    network.step(slow[:300].T[None].contiguous(), LR, TAU)
    after = network.to_module()
    for p, q in zip(after.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def together(width: int, runs: int, steps: int) -> Callable[[], object]:
    tree, network = hltm.HLTM(DEPTH, 0.7, runs=runs), hltm.HLTMNetwork(DEPTH, width, runs)
    return lambda: hltm.train(network, tree, epochs=1, draws=steps * BATCH, batch_size=BATCH, lr=LR, tau=TAU)


def one_by_one(draw: Callable[..., list[int]], tables: bool, width: int, steps: int) -> Callable[[], object]:
    module = hltm.HLTMNetwork(DEPTH, width).to_module()
    polarity = [level[0].tolist() for level in hltm.HLTM(DEPTH, 0.7).polarity]
    tree, optimizer = tables_of(polarity) if tables else polarity, torch.optim.SGD(module.parameters(), LR)

    def run() -> None:
        for _ in range(steps):
            slow_step(module, optimizer, slow_batch(draw, tree, BATCH))

    return run


def run(tiny: bool = False) -> Section:
    runs, steps, slow_steps, repeats = (2, 2, 1, 1) if tiny else (30, DRAWS // BATCH, 5, 3)
    random.seed(0)
    contenders: dict[str, Callable[[], object]] = {}
    for width in (2, 10):
        check(width, 100 if tiny else 500)
        contenders[f"{width}"] = together(width, runs, steps)
        contenders[f"multinomial {width}"] = one_by_one(by_multinomial, True, width, slow_steps)
        contenders[f"python {width}"] = one_by_one(in_python, False, width, slow_steps)
    seconds = race(contenders, repeats, warm_up=0)
    scale = runs * steps / slow_steps
    rows = []
    for width in (2, 10):
        work, fast = f"an epoch of {runs} runs, {width} units a node", seconds[f"{width}"]
        published, python = ([s * scale for s in seconds[f"{way} {width}"]] for way in ("multinomial", "python"))
        rows.append(faster(work, "as published", fast, published, 200))
        rows.append(faster(work, "draws in plain Python", fast, python))
    return Section(rows)


if __name__ == "__main__":
    main(run, threads=1)

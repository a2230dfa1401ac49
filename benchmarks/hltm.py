"""An epoch of latent-tree training (DDN-v2 Sec. 5): 64,000 triplets of depth-5 trees, InfoNCE, batches of 128, SGD.

Against the experiment as it is described: each sample's tree drawn node by node, an `nn.Linear` a node, autograd, one
run after the other. Ours draws and trains the 30 runs of a table at once. The slow side is timed on a few steps and
scaled to the epoch; both are given for 30 runs. Asserted: the same moments of the leaves, and the same weights after a
step from the same batch.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks._bench import Section, faster, main, race
from lightning_ssl.theory import hltm

DRAWS, BATCH, DEPTH, LR, TAU = 64_000, 128, 5, 0.1, 0.1


def draw_leaves(polarity: list[list[float]], root: int, dice: random.Random) -> list[int]:
    """One tree below a root, node by node: a child takes its parent's value with probability (1 + rho) / 2."""
    values = [root]
    for level in polarity:
        values = [
            values[i // 2] if dice.random() < (1 + rho) / 2 else 1 - values[i // 2] for i, rho in enumerate(level)
        ]
    return values


def slow_batch(polarity: list[list[float]], size: int, dice: random.Random) -> Tensor:
    """[anchor | positive | negative], each of `size` rows."""
    roots = [dice.randrange(2) for _ in range(size)]
    parts = [roots, roots, [dice.randrange(2) for _ in range(size)]]
    return torch.tensor([draw_leaves(polarity, root, dice) for part in parts for root in part], dtype=torch.float32)


def slow_step(module: torch.nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    f = module(x)
    f = f / (f.norm(dim=1, keepdim=True) + hltm.NORM_EPS)
    anchor, positive, negative = f.chunk(3)
    gap = ((anchor - positive).square().sum(1) - (anchor - negative).square().sum(1)) / 2
    optimizer.zero_grad()
    torch.nn.functional.softplus(gap / TAU).mean().backward()
    optimizer.step()


def check(width: int) -> None:
    tree, network = hltm.HLTM(DEPTH, 0.7), hltm.HLTMNetwork(DEPTH, width)
    polarity = [level[0].tolist() for level in tree.polarity]
    slow = slow_batch(polarity, 2000, random.Random(0))
    fast = next(iter(hltm.batches(tree, 1, 2000, torch.Generator().manual_seed(0))))[0].T
    for a, b in zip(slow.chunk(3), fast.chunk(3), strict=True):
        assert (a.T.cov() - b.T.cov()).abs().max() < 0.05 and (a.mean(0) - b.mean(0)).abs().max() < 0.08
    module = network.to_module()
    slow_step(module, torch.optim.SGD(module.parameters(), LR), slow[:300])
    network.step(slow[:300].T[None].contiguous(), LR, TAU)
    after = network.to_module()
    for p, q in zip(after.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def together(width: int, runs: int, steps: int) -> Callable[[], object]:
    tree, network = hltm.HLTM(DEPTH, 0.7, runs=runs), hltm.HLTMNetwork(DEPTH, width, runs)
    return lambda: hltm.train(network, tree, epochs=1, draws=steps * BATCH, batch_size=BATCH, lr=LR, tau=TAU)


def one_by_one(width: int, steps: int) -> Callable[[], object]:
    tree, module = hltm.HLTM(DEPTH, 0.7), hltm.HLTMNetwork(DEPTH, width).to_module()
    polarity, dice = [level[0].tolist() for level in tree.polarity], random.Random(0)
    optimizer = torch.optim.SGD(module.parameters(), LR)

    def run() -> None:
        for _ in range(steps):
            slow_step(module, optimizer, slow_batch(polarity, BATCH, dice))

    return run


def run(tiny: bool = False) -> Section:
    runs, steps, slow_steps, repeats = (2, 2, 1, 1) if tiny else (30, DRAWS // BATCH, 10, 3)
    tree, polarity = hltm.HLTM(DEPTH, 0.7, runs=runs), [level[0].tolist() for level in hltm.HLTM(DEPTH, 0.7).polarity]
    contenders: dict[str, Callable[[], object]] = {
        "draws": lambda: deque(hltm.batches(tree, steps, BATCH, torch.Generator().manual_seed(0)), maxlen=0),
        "slow draws": lambda: [slow_batch(polarity, BATCH, random.Random(0)) for _ in range(slow_steps)],
    }
    for width in (2, 10):
        check(width)
        contenders |= {f"{width}": together(width, runs, steps), f"slow {width}": one_by_one(width, slow_steps)}
    seconds = race(contenders, repeats, warm_up=1 if tiny else 0)
    scale = runs * steps / slow_steps
    scaled = {name: [s * scale for s in times] for name, times in seconds.items() if name.startswith("slow")}
    work = f"an epoch of {runs} runs"
    rows = [faster(f"{work}, draws alone", "sample by sample", seconds["draws"], scaled["slow draws"])]
    for width in (2, 10):
        rows.append(
            faster(
                f"{work}, {width} units a node", "sample by sample", seconds[f"{width}"], scaled[f"slow {width}"], 200
            )
        )
    return Section(rows)


if __name__ == "__main__":
    main(run, threads=1)

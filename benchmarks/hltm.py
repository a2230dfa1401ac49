"""How fast latent trees are drawn and their networks trained, all runs at once, against one run at a time by autograd.

    python -m benchmarks.hltm [--runs 30] [--steps 40]

Prints CPU seconds and ratios within this one process; absolute figures depend on the machine.
"""

from __future__ import annotations

import argparse
import time

import torch

from lightning_ssl.theory import hltm


def together(width: int, runs: int, steps: int) -> float:
    """CPU seconds a step of all runs at once, the draws included."""
    tree, network = hltm.HLTM(5, 0.7, runs=runs), hltm.HLTMNetwork(5, width, runs)
    start = time.process_time()
    for x in hltm.batches(tree, steps, 128, torch.Generator().manual_seed(0)):
        network.step(x, 0.1, 0.1)
    return (time.process_time() - start) / steps


def one_by_one(width: int, runs: int, steps: int) -> float:
    """CPU seconds a step of all runs, each an ordinary module of Linear layers trained by autograd and SGD."""
    tree, module = hltm.HLTM(5, 0.7), hltm.HLTMNetwork(5, width).to_module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    start = time.process_time()
    for x in hltm.batches(tree, steps, 128, torch.Generator().manual_seed(0)):
        f = torch.nn.functional.normalize(module(x[0].T), dim=1)
        anchor, positive, negative = f.chunk(3)
        gap = ((anchor - positive).square().sum(1) - (anchor - negative).square().sum(1)) / 2
        optimizer.zero_grad()
        torch.nn.functional.softplus(gap / 0.1).mean().backward()
        optimizer.step()
    return runs * (time.process_time() - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    tree = hltm.HLTM(5, 0.7)
    start = time.process_time()
    tree.sample(64_000, torch.Generator().manual_seed(0))
    print(f"one tree's epoch of 64,000 draws: {time.process_time() - start:.3f} CPU s")
    for width in (2, 10):
        fast, slow = together(width, args.runs, args.steps), one_by_one(width, args.runs, args.steps)
        print(
            f"|N| = {width}, {args.runs} runs: {1000 * fast:.1f} ms a step at once, {1000 * slow:.0f} ms one by one, "
            f"x{slow / fast:.1f}; an epoch (500 steps) takes {500 * fast:.1f} CPU s"
        )


if __name__ == "__main__":
    main()

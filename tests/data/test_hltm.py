"""Draws from latent trees have the law they should, and the DataModule's epochs are the same at any number of ranks."""

from __future__ import annotations

import pytest
import torch
from jsonargparse import ArgumentParser

from lightning_ssl.data.loader import ShardLoader, ShardSampler
from lightning_ssl.data.synthetic import HLTM, HLTMDataModule, MixtureDataModule, latent_position
from lightning_ssl.data.synthetic.base import SyntheticDataModule


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("states", "branching"), [(2, 2), (2, 3), (3, 2)])
def test_transitions_are_those_stated(states: int, branching: int) -> None:
    tree = HLTM(2, -0.4 if states == 2 else 0.2, 1.0, runs=2, states=states, branching=branching, seed=1)
    n = 200_000
    levels = tree.sample(n, generator())
    for level in (1, 2):
        expected = tree.transition(level)
        torch.testing.assert_close(expected.sum(-1), torch.ones_like(expected[..., 0]))
        torch.testing.assert_close(expected.sum(-2), torch.ones_like(expected[..., 0]))  # transition-regularised
        parent = levels[level - 1].repeat_interleave(branching, dim=1).long()
        joint = torch.zeros(2, branching**level, states * states)
        joint.scatter_add_(2, parent * states + levels[level].long(), torch.ones(parent.shape))
        joint = joint.unflatten(-1, (states, states))
        observed = joint / joint.sum(-1, keepdim=True)
        assert (observed - expected).abs().max() < 5 * (0.25 / (n / states)) ** 0.5 + 2e-5


def test_extreme_polarities_are_certain() -> None:
    tree = HLTM.from_polarities([torch.tensor([[1.0, -1.0]]), torch.tensor([[1.0, 0.0, -1.0, 1.0]])])
    z0, z1, z2 = tree.sample(4096, generator())
    assert torch.equal(z1[:, :1], z0) and torch.equal(z1[:, 1:], 1 - z0)
    assert torch.equal(z2[:, 0], z0[:, 0]) and torch.equal(z2[:, 2], z0[:, 0])
    assert 0.45 < z2[:, 1].float().mean() < 0.55


def test_root_law_and_path_polarity() -> None:
    tree = HLTM(3, 0.7, root_polarity=0.5, runs=3)
    levels = tree.sample(100_000, generator())
    assert levels[0].float().mean().item() == pytest.approx(0.75, abs=0.01)
    level, index = latent_position("s101")
    rho = 2 * (levels[level][:, index] == levels[0][:, 0]).double().mean(-1) - 1
    torch.testing.assert_close(rho, tree.root_polarities("s101"), atol=0.02, rtol=0)


def test_augmentation_keeps_the_root_only() -> None:
    tree = HLTM(3, 0.5, runs=2)
    root = tree.sample_root(5000, generator())
    a, b = tree.sample(5000, generator(1), root), tree.sample(5000, generator(2), root)
    assert torch.equal(a[0], b[0]) and not torch.equal(a[1], b[1])


def test_polarity_range_and_signs() -> None:
    tree = HLTM(5, [0.7, 0.9], runs=2)
    rho = torch.cat(tree.polarity, 1)
    assert (rho[0].abs() >= 0.7).all() and (rho[1].abs() >= 0.9).all() and (rho.abs() <= 1).all()
    assert (rho < 0).any() and (rho > 0).any()
    assert (torch.cat(HLTM(5, 0.7, signed=False).polarity, 1) >= 0.7).all()


def test_views_of_the_leaves() -> None:
    tree = HLTM(1, states=3, branching=2)
    leaves = torch.tensor([[[0, 2], [1, 1]]], dtype=torch.uint8)
    assert tree.observe(leaves, "onehot")[0].T.tolist() == [[1, 0, 0, 0, 1, 0], [0, 0, 1, 0, 1, 0]]
    with pytest.raises(ValueError, match="onehot"):
        tree.observe(leaves, "01")
    assert HLTM(1).observe(torch.tensor([[[0], [1]]], dtype=torch.uint8), "+-1").flatten().tolist() == [-1, 1]


def test_datamodule_is_a_function_of_seed_epoch_and_index() -> None:
    module = HLTMDataModule(depth=3, draws=64, batch_size=16, probe_draws=10)
    first = list(module.train_dataloader())
    assert len(first) == 4 and first[0].views[0].shape == (16, 8) and first[0].label.shape == (16,)
    loader = module.train_dataloader()
    assert torch.equal(next(iter(loader)).views[1], first[0].views[1])
    loader.sampler.set_epoch(1)
    assert not torch.equal(next(iter(loader)).views[1], first[0].views[1])
    draws = module.epoch_draws(0)
    index = torch.cat([b.index for b in first])
    assert torch.equal(torch.cat([b.views[0] for b in first]), draws.views[0][index])
    train, test = module.probe_dataloaders()
    assert sum(len(b.index) for b in train) == sum(len(b.index) for b in test) == 10
    assert module.num_features == 8 and module.num_classes == 2


def test_two_ranks_see_what_one_sees() -> None:
    """The b-th batches of both ranks together are the b-th batch of one process, bit for bit."""
    alone = list(HLTMDataModule(depth=3, draws=64, batch_size=16).train_dataloader())
    ranks = []
    for rank in range(2):
        loader = HLTMDataModule(depth=3, draws=64, batch_size=8).train_dataloader()
        sampler = ShardSampler(loader.dataset, rank, 2, even=True)
        ranks.append(list(ShardLoader(loader.dataset, sampler=sampler, batch_size=8)))
    assert len(ranks[0]) == len(ranks[1]) == len(alone)
    for whole, *parts in zip(alone, *ranks, strict=True):
        index = torch.cat([p.index for p in parts])
        order = index.argsort()
        assert torch.equal(index[order], whole.index)
        for view in range(2):
            assert torch.equal(torch.cat([p.views[view] for p in parts])[order], whole.views[view])


@pytest.mark.parametrize("cls", [HLTMDataModule, MixtureDataModule])
def test_shared_arguments_reach_the_command_line_and_the_hyperparameters(cls: type[SyntheticDataModule]) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls, "data")
    config = parser.parse_args(["--data.batch_size=32", "--data.draws=96"])
    assert config.data.num_views == 2 and config.data.probe_draws == 4096
    module = cls(**config.data)
    assert len(module.train_dataloader()) == 3
    assert module.hparams["batch_size"] == 32 and module.hparams["seed"] == 0
    with pytest.raises(TypeError, match="batchsize"):
        cls(batchsize=3)


def test_validation_has_batches_even_when_small() -> None:
    batch = next(iter(HLTMDataModule(depth=2, draws=64, batch_size=32, probe_draws=10).val_dataloader()))
    assert len(batch.views) == 2 and len(batch.index) == 10


def test_refuses_bad_input() -> None:
    with pytest.raises(ValueError, match="`depth` must be at least 1, got 0"):
        HLTM(0)
    with pytest.raises(ValueError, match=r"\[-1, 1\]"):
        HLTM(2, lower=-1.5)
    with pytest.raises(ValueError, match=r"\[-1, 1\]"):
        HLTM(2, upper=1.2)
    with pytest.raises(ValueError, match=r"\[-1, 1\]"):
        HLTM.from_polarities([torch.tensor([[1.5, 0.0]])])
    with pytest.raises(ValueError, match="one a run"):
        HLTM(2, lower=[0.7, 0.8], runs=3)
    with pytest.raises(ValueError, match="`batch_size` must be at most draws=10, got 20"):
        HLTMDataModule(draws=10, batch_size=20)
    with pytest.raises(ValueError, match=r"`values` must be .* got 'rgb'"):
        HLTMDataModule(values="rgb")

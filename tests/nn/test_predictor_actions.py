import pytest
import torch
from torch import nn

from lightning_ssl.functional import direct_predictor, optimal_predictor
from lightning_ssl.nn import (
    DirectPredictorUpdate,
    PartitionedLinear,
    reset_parameters_,
    symmetrize_,
    symmetrize_two_layers_,
)
from tests.ddp import run_ranks


def test_symmetrize():
    layer = nn.Linear(4, 4)
    weight = layer.weight.detach().clone()
    symmetrize_(layer)
    assert torch.equal(layer.weight, layer.weight.T)
    torch.testing.assert_close(layer.weight, (weight + weight.T) / 2)
    assert layer.weight.requires_grad


def test_symmetrize_two_layers():
    predictor = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))
    first, second = predictor[0].weight.detach().clone(), predictor[3].weight.detach().clone()
    biases = [predictor[i].bias.detach().clone() for i in (0, 3)]
    symmetrize_two_layers_(predictor)
    torch.testing.assert_close(predictor[0].weight, (first + second.T) / 2)
    assert torch.equal(predictor[3].weight, predictor[0].weight.T)
    assert all(torch.equal(predictor[i].bias, b) for i, b in zip((0, 3), biases, strict=True))
    for wrong in (nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5))):
        with pytest.raises(ValueError, match="two layers"):
            symmetrize_two_layers_(wrong)


@pytest.mark.parametrize("predictor", [nn.Linear(4, 3), nn.Identity(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))])
def test_only_one_square_linear_layer_can_be_acted_on(predictor):
    with pytest.raises(ValueError, match="one square"):
        symmetrize_(predictor)


def test_reset_is_a_function_of_the_seed_alone_and_leaves_the_generator():
    predictor = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    predictor(torch.randn(6, 4))
    before = torch.get_rng_state()
    reset_parameters_(predictor, seed=5)
    assert torch.equal(before, torch.get_rng_state())
    first = {k: v.clone() for k, v in predictor.state_dict().items()}
    assert first["1.num_batches_tracked"] == 0 and first["1.running_mean"].abs().sum() == 0
    torch.randn(3)
    reset_parameters_(predictor, seed=5)
    assert all(torch.equal(v, first[k]) for k, v in predictor.state_dict().items())
    reset_parameters_(predictor, seed=6)
    assert not torch.equal(predictor[0].weight, first["0.weight"])


@pytest.mark.parametrize("init,low,high", [("uniform", -0.02, 0.02), ("positive", 0.0, 0.02)])
def test_reset_ranges(init, low, high):
    predictor = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    reset_parameters_(predictor, init, 0.02)
    for layer in (predictor[0], predictor[2]):
        assert low <= layer.weight.min() < low + 0.001 and high - 0.001 < layer.weight.max() <= high
        assert layer.bias.abs().max() == 0


def test_reset_to_identity_and_bad_arguments():
    layer = nn.Linear(3, 3)
    reset_parameters_(layer, "identity")
    assert torch.equal(layer.weight, torch.eye(3))
    with pytest.raises(ValueError, match="init_range"):
        reset_parameters_(layer, "uniform")
    with pytest.raises(ValueError, match="`init`"):
        reset_parameters_(layer, "zeros")
    with pytest.raises(ValueError, match="identity"):
        reset_parameters_(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)), "identity")


def batches(steps, rows=12, dim=5):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, rows, dim, generator=generator) for _ in range(steps)]


def reference(steps, rho, freq, combine):
    """The weight after each step, from the definition; None where the predictor is not set."""
    F = M = None
    weights = []
    for k, (f, target) in enumerate(batches(steps)):
        f, target = f.double(), target.double()
        batch_F, batch_M = f.T @ f / len(f), f.T @ target / len(f)
        F = batch_F if F is None else rho * F + (1 - rho) * batch_F
        M = batch_M if M is None else rho * M + (1 - rho) * batch_M
        weights.append(combine(F, M) if (k + 1) % freq == 0 else None)
    return weights


@pytest.mark.parametrize("rho,eps,freq,shift", [(0.3, 0.1, 1, 0.0), (0.0, 0.0, 1, 0.05), (0.5, 0.1, 3, -0.1)])
def test_direct_predictor_follows_its_definition(rho, eps, freq, shift):
    layer, update = nn.Linear(5, 5), DirectPredictorUpdate(rho, eps, freq, shift)
    expected = reference(6, rho, freq, lambda F, M: direct_predictor(F, eps, shift).float())
    for (f, _), weight in zip(batches(6), expected, strict=True):
        before = layer.weight.detach().clone()
        for micro_batch in f.chunk(3):  # micro-batches count as one batch
            update.update(micro_batch)
        assert update.step(layer) == (weight is not None)
        torch.testing.assert_close(layer.weight.detach(), before if weight is None else weight)


def test_optimal_mode_solves_for_the_symmetric_predictor():
    layer, update = nn.Linear(5, 5), DirectPredictorUpdate(rho=0.5, mode="optimal", reg=0.01)
    expected = reference(4, 0.5, 1, lambda F, M: optimal_predictor(F, M, 0.01 * float(F.trace() / 5)).float())
    for (f, target), weight in zip(batches(4), expected, strict=True):
        update.update(f, target)
        update.step(layer)
        torch.testing.assert_close(layer.weight.detach(), weight)
    with pytest.raises(ValueError, match="targets"):
        update.update(f)


def test_partitions_give_each_row_the_predictors_of_its_own_sides():
    """By hand, row by row: split at the batch mean of each projection, an F a side, the mean of a row's own maps."""
    layer = PartitionedLinear(nn.Linear(5, 5, bias=False), partitions=3, seed=7).double()
    update = DirectPredictorUpdate(rho=0.0, partitions=3)
    f = batches(1)[0][0].double() + 1.0  # off the origin: a hyperplane through it would leave a side almost empty
    normals = torch.randn(3, 5, generator=torch.Generator().manual_seed(7)).double()
    sides = layer.sides(f, layer.thresholds_of(f))
    update.update(f, sides=sides)
    assert update.step(layer)
    expected = []
    for row in f:
        maps = []
        for normal in normals:
            projections = f @ normal
            above = projections >= projections.mean()
            same = f[above == (row @ normal >= projections.mean())]
            maps.append(direct_predictor(same.T @ same / len(same)))
        expected.append(torch.stack(maps).mean(0) @ row)
    expected = torch.stack(expected)
    torch.testing.assert_close(layer(f, sides), expected)
    torch.testing.assert_close(layer(f), expected)  # with the thresholds of the step, one row at a time too
    torch.testing.assert_close(layer(f[3:4]), expected[3:4])
    # No one matrix does that: the least-squares one leaves a residue.
    static = torch.linalg.lstsq(f, expected).solution
    assert (f @ static - expected).norm() > 0.01 * expected.norm()


def test_a_side_without_rows_keeps_its_average_and_an_unseen_one_its_start():
    start = nn.Linear(5, 5)
    layer, update = PartitionedLinear(start, 1), DirectPredictorUpdate(rho=0.5, partitions=1)
    f = batches(1)[0][0].double()
    above, moment = torch.ones(1, len(f), dtype=torch.bool), f.T @ f / len(f)
    update.update(f, sides=above)
    update.step(layer)
    torch.testing.assert_close(layer.weight[0, 1].detach(), direct_predictor(moment).float())
    assert torch.equal(layer.weight[0, 0], start.weight)
    update.update(2 * f, sides=~above)
    update.step(layer)
    torch.testing.assert_close(update.F[1], moment)
    torch.testing.assert_close(update.F[0], 4 * moment)


def test_partitions_must_fit_the_predictor_and_the_rows():
    update, rows = DirectPredictorUpdate(partitions=2), torch.randn(4, 5)
    with pytest.raises(ValueError, match="`sides`"):
        update.update(rows)
    with pytest.raises(ValueError, match="`sides`"):
        update.update(rows, sides=torch.ones(3, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="`sides`"):
        DirectPredictorUpdate().update(rows, sides=torch.ones(2, 4, dtype=torch.bool))
    update.update(rows, sides=torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="PartitionedLinear"):
        update.step(nn.Linear(5, 5))
    with pytest.raises(ValueError, match="square"):
        PartitionedLinear(nn.Linear(5, 4), 2)


def test_state_continues_where_it_stopped(tmp_path):
    whole, layer = DirectPredictorUpdate(rho=0.7, freq=2), nn.Linear(5, 5)
    first, second = DirectPredictorUpdate(rho=0.7, freq=2), DirectPredictorUpdate(rho=0.7, freq=2)
    for k, (f, _) in enumerate(batches(5)):
        whole.update(f)
        whole.step(layer)
        part = first if k < 3 else second
        if k == 3:
            torch.save(first.state_dict(), tmp_path / "state.pt")
            second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        part.update(f)
        part.step(layer)
    assert torch.equal(second.F, whole.F) and second.steps == whole.steps == 5


def test_step_needs_inputs():
    with pytest.raises(RuntimeError, match="update"):
        DirectPredictorUpdate().step(nn.Linear(3, 3))


@pytest.mark.parametrize("bad", [{"rho": 1.0}, {"eps": -1.0}, {"freq": 0}, {"shift": 1.0}, {"mode": "best"}])
def test_bad_arguments_are_named(bad):
    with pytest.raises(ValueError, match=f"`{next(iter(bad))}`"):
        DirectPredictorUpdate(**bad)


def direct_steps(mode, partitions, rows=slice(None)):
    torch.manual_seed(0)
    layer, update = nn.Linear(5, 5), DirectPredictorUpdate(rho=0.5, mode=mode, partitions=partitions)
    if partitions:
        layer = PartitionedLinear(layer, partitions)
    for f, target in batches(3):
        f, target = f[rows], target[rows]
        sides = layer.sides(f, layer.thresholds_of(f)) if partitions else None
        update.update(f, target if mode == "optimal" else None, sides)
        update.step(layer)
    return layer.weight.detach()


def direct_on_rank(rank, world_size, mode, partitions):
    return direct_steps(mode, partitions, slice(0, 5) if rank == 0 else slice(5, None))  # unequal shards


@pytest.mark.parametrize("partitions", [0, 2])
@pytest.mark.parametrize("mode", ["direct", "optimal"])
def test_two_ranks_equal_one_process(mode, partitions):
    first, second = run_ranks(2, direct_on_rank, mode, partitions)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, direct_steps(mode, partitions), rtol=1e-5, atol=1e-6)


def test_the_callback_refuses_partitions():
    """A callback cannot make a stranger's linear layer depend on the features."""
    from lightning_ssl.callbacks import DirectPredictor

    with pytest.raises(ValueError, match="partitions"):
        DirectPredictor(partitions=2)

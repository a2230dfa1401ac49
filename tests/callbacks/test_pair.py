"""From calls to views of the same samples: what is certain, what is tested, what is asked."""

from __future__ import annotations

import pytest
import torch

from lightning_ssl.callbacks._engine.pair import Declared, gather_evidence, sample_rows, settle


def read(entered, batch, views=None, pairing=None):
    """Kind and number of views, and the rows of each sample."""
    declared = Declared(views, pairing)
    rows = [len(x) for x in entered]
    reading = settle([gather_evidence(entered, rows, batch, declared)], declared)
    return reading.kind, sample_rows(reading, rows, declared)


def pairs(n=32, noise=0.5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 1, 12, generator=generator)
    return x + noise * torch.randn(n, 2, 12, generator=generator)


X = pairs()
BLOCKED, INTERLEAVED = X.transpose(0, 1).flatten(0, 1), X.flatten(0, 1)
LABELS = torch.zeros(32, dtype=torch.long)


def test_calls_are_views_and_are_not_questioned():
    unrelated = torch.randn(4, 3), torch.randn(4, 3)
    kind, rows = read(unrelated, [torch.zeros(4)])
    assert kind == "calls" and rows.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    same = torch.ones(4, 3)  # a collapsed run is still measured
    assert read([same, same], [torch.zeros(4)])[0] == "calls"
    assert read([same, same, same], None)[1].shape == (4, 3)
    # Even where each call looks as if it held two views, and some tensor has half its rows.
    kind, rows = read([BLOCKED, BLOCKED], [torch.zeros(64), LABELS])
    assert kind == "calls" and rows.shape == (64, 2)


@pytest.mark.parametrize(("x", "kind"), [(BLOCKED, "blocked"), (INTERLEAVED, "interleaved")])
@pytest.mark.parametrize("views", [None, 2])
def test_one_call_on_both_views_is_told_by_what_entered(x, kind, views):
    found, rows = read([x], {"label": LABELS}, views)
    assert found == kind
    expected = torch.arange(64).view(2, 32).T if kind == "blocked" else torch.arange(64).view(32, 2)
    assert torch.equal(rows, expected)


def test_equality_with_the_batch_is_certain():
    far = torch.randn(6, 2, 5)  # views that are not close
    a, b = far.unbind(dim=1)
    label = torch.zeros(6)
    assert read([torch.cat([a, b])], [a, b, label])[0] == "blocked"
    assert read([far.flatten(0, 1)], [far, label])[0] == "interleaved"
    assert read([far.transpose(0, 1).flatten(0, 1)], [far, label])[0] == "blocked"
    assert read([far.flatten(0, 1)], [a, b, label])[0] == "interleaved"


def test_token_ids_are_compared_as_they_are():
    ids = torch.randint(0, 50, (16, 8))
    assert read([ids.repeat_interleave(2, dim=0)], {"ids": ids})[0] == "interleaved"
    changed = torch.stack([ids, torch.where(torch.rand(16, 8) < 0.2, 0, ids)], dim=1)
    assert read([changed.flatten(0, 1)], {"label": torch.zeros(16)})[0] == "interleaved"


def test_a_view_alone_is_one_view_whatever_else_is_in_the_batch():
    x = torch.randn(64, 12)
    kind, rows = read([x], [x, torch.zeros(32)])
    assert kind == "calls" and rows.shape == (64, 1)
    assert read([x], [torch.zeros(64)])[1].shape == (64, 1)
    assert read([x], None)[1].shape == (64, 1)
    few = torch.randn(8, 12)
    assert read([few], [few.clone(), torch.zeros(4)])[1].shape == (8, 1)
    assert read([BLOCKED], None, 1, "blocked")[1].shape == (64, 1)


@pytest.mark.parametrize(
    ("entered", "batch", "views", "pairing", "words"),
    [
        ([torch.randn(64, 12)], [LABELS], None, None, 'pairing="interleaved"'),  # no view is like another
        ([torch.ones(64, 12)], [LABELS], None, None, "`views=2`"),
        ([torch.randn(8, 12)], [torch.zeros(8), torch.zeros(4)], None, None, "`views=1` if each row is a sample"),
        ([torch.randn(64, 12)], [torch.zeros(24)], None, None, "cannot be samples of a batch"),
        ([torch.randn(49 * 4, 12)], [torch.zeros(4)], None, None, "cannot be samples of a batch"),
        ([torch.randn(8, 3)] * 3, [torch.zeros(8)], 2, None, "3 calls of 8, 8, 8 rows"),
        ([torch.randn(8, 3), torch.randn(6, 3)], None, None, None, "cannot tell the views apart"),
        ([torch.randn(64, 12)], None, None, "blocked", "needs `views=`"),
        ([torch.randn(9, 3)], None, 2, "blocked", "does not hold 2 views"),
        ([torch.randn(8, 3)], None, 2, "calls", "are not 2 views"),
    ],
)
def test_doubt_names_the_argument_that_settles_it(entered, batch, views, pairing, words):
    with pytest.raises(ValueError, match=words):
        read(entered, batch, views, pairing)


def test_what_is_declared_wins():
    assert read([BLOCKED], [LABELS], 2, "interleaved")[0] == "interleaved"
    assert read([BLOCKED], [LABELS], 1)[1].shape == (64, 1)
    kind, rows = read([torch.randn(8, 3)] * 3, None, None, lambda calls: calls[1:])
    assert kind == "function" and rows[0].tolist() == [8, 16]


def test_crops_of_several_sizes():
    large, small = BLOCKED, torch.cat([BLOCKED, BLOCKED])[:, :6]
    kind, rows = read([large, small], [LABELS])
    assert kind == "blocked" and rows.shape == (32, 6)
    assert rows[0].tolist() == [0, 32, 64, 96, 128, 160]


def test_ranks_judge_together():
    """Each rank's few rows leave doubt; all of them together do not."""
    declared, x = Declared(), pairs(12, noise=1.0, seed=3)
    shards = [x[r::4].flatten(0, 1) for r in range(4)]
    evidence = [gather_evidence([shard], [len(shard)], [torch.zeros(3)], declared) for shard in shards]
    with pytest.raises(ValueError, match="pairing"):
        settle(evidence[:1], declared)
    assert settle(evidence, declared).kind == "interleaved"
    assert settle([], declared) is None

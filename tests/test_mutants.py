"""Every mistake of the list still has its place in the code."""

from tests.mutants.__main__ import ROOT, all_mutants


def test_each_mistake_has_one_place():
    mutants = all_mutants()
    lost = [mutant for mutant in mutants if (ROOT / mutant.file).read_text().count(mutant.old) != 1]
    assert len(mutants) > 200 and not lost

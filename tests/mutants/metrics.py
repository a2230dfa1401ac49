"""What the metrics accumulate."""

from tests.mutants import Mutant

MUTANTS = [
    Mutant(
        "lightning_ssl/metrics/geometry.py",
        "self.count = self.count + len(x)\n\n    def compute(self) -> Tensor:\n        self._check_updated(self.count)\n        return self.total / self.count",
        "self.count = self.count + 1\n\n    def compute(self) -> Tensor:\n        self._check_updated(self.count)\n        return self.total / self.count",
        "tests/metrics/test_metrics.py -k 'agree and alignment'",
    ),
    Mutant(
        "lightning_ssl/metrics/geometry.py",
        "return uniformity(rows, self.t)",
        "return uniformity(rows)",
        "tests/metrics/test_metrics.py -k uniformity",
    ),
    Mutant(
        "lightning_ssl/metrics/geometry.py",
        "floor = eigenvalues[-1] * len(eigenvalues) * torch.finfo(torch.float64).eps",
        "floor = eigenvalues[-1] * -1",
        "tests/metrics/test_metrics.py",
    ),
    Mutant(
        "lightning_ssl/metrics/geometry.py",
        "torch.where(eigenvalues > floor, eigenvalues, 0).sqrt()",
        "torch.where(eigenvalues > floor, eigenvalues, 0)",
        "tests/metrics/test_metrics.py -k effective_rank",
    ),
    Mutant(
        "lightning_ssl/metrics/evaluation.py",
        "first[1:] = everyone[order][1:] != everyone[order][:-1]",
        "pass",
        "tests/metrics/test_metrics.py -k knn",
    ),
    Mutant(
        "lightning_ssl/metrics/evaluation.py",
        "(place < 5).sum()",
        "(place < 2).sum()",
        "tests/metrics/test_metrics.py -k knn",
    ),
    Mutant(
        "lightning_ssl/metrics/evaluation.py",
        "((scores == own) & before).sum(dim=1)",
        "(scores == own).sum(dim=1) * 0",
        "tests/metrics/test_metrics.py -k of_equal_scores",
    ),
    Mutant(
        "lightning_ssl/metrics/evaluation.py",
        "(~(scores <= own)).sum(dim=1)",
        "(scores > own).sum(dim=1)",
        "tests/metrics/test_metrics.py -k of_equal_scores",
    ),
    Mutant(
        "lightning_ssl/metrics/evaluation.py",
        "[a + b for a, b in zip(self._sums, sums, strict=True)] if self._sums else sums",
        "sums",
        "tests/metrics/test_metrics.py -k few_at_a_time",
    ),
    Mutant(
        "lightning_ssl/metrics/knn.py",
        "self._cache[name] = pieces",
        "pass",
        "tests/metrics/test_metrics.py -k stays",
    ),
    Mutant(
        "lightning_ssl/metrics/knn.py",
        "self.num_classes, self.k, self.temperature, together",
        "self.num_classes, self.k, 0.1, together",
        "tests/metrics/test_metrics.py -k votes",
    ),
    Mutant(
        "lightning_ssl/metrics/moments.py",
        "self.count if self.unbiased else None",
        "None",
        "tests/metrics/test_metrics.py -k 'correlation'",
    ),
    Mutant(
        "lightning_ssl/metrics/moments.py",
        "generalization_bound(l_cor, len(correlation), self.num_classes)",
        "generalization_bound(l_cor, self.num_classes, self.num_classes)",
        "tests/metrics/test_metrics.py -k 'correlation'",
    ),
    Mutant(
        "lightning_ssl/metrics/moments.py",
        "x = x.detach().double()\n        self.total",
        "x = x.detach().float()\n        self.total",
        "tests/metrics/test_metrics.py",
    ),
]

"""What looks at many rows runs in bounded memory, at the size of a real probe."""

import subprocess
import sys
import textwrap

import pytest

CASES = {
    # A full matrix of similarities would be 1.6 GB here, and be kept for the backward pass.
    "uniformity_backward": (
        300,
        "x = torch.randn(20_000, 64, requires_grad=True); peak(lambda: F.uniformity(x).backward())",
    ),
    "uniformity": (300, "x = torch.randn(50_000, 512); peak(lambda: F.uniformity(x))"),
    # Copies that are made and let go one by one leave holes which the next one does not fit into.
    "check_rows": (
        60,
        "from lightning_ssl.functional.checks import check_rows;"
        "x = torch.randn(200_000, 768); peak(lambda: check_rows(x, 'x', nonzero=True))",
    ),
    # Blocks of 500 classes and their inverses are 134 MB.
    "fit_linear_probe": (
        400,
        "import warnings; warnings.simplefilter('ignore'); torch.manual_seed(0);"
        "x, y = torch.randn(40_000, 512), torch.randint(500, (40_000,));"
        "peak(lambda: F.fit_linear_probe(x, y, 500, 4e-3, max_iter=2, tolerance=0.0))",
    ),
    # Nine tenths of the features would be 184 MB, and the outputs for all of them 400 MB.
    "linear_evaluation": (
        260,
        "from lightning_ssl.metrics.evaluation import Shard, linear_evaluation;"
        "from lightning_ssl.distributed import Together; torch.manual_seed(0);"
        "x, y, at = torch.randn(100_000, 512), torch.randint(1000, (100_000,)), torch.arange(100_000);"
        "part = lambda n: Shard(x[:n], y[:n], at[:n], n); together = Together(x.device, sharded=False);"
        "linear_evaluation(part(600), part(600), 1000, [1.0, 0.9], together);"
        "peak(lambda: linear_evaluation(part(100_000), part(100_000), 1000, [1.0, 0.9], together))",
    ),
    # The votes for all queries would be 400 MB.
    "knn_evaluation": (
        300,
        "from lightning_ssl.metrics.evaluation import Shard, knn_evaluation;"
        "from lightning_ssl.distributed import Together; torch.manual_seed(0);"
        "x, y, at = torch.randn(50_000, 16), torch.randint(1000, (50_000,)), torch.arange(50_000);"
        "bank, queries = Shard(x[:500], y[:500], at[:500], 500), Shard(x, y, at, 50_000);"
        "peak(lambda: knn_evaluation(bank, queries, 1000, 20, 0.1, Together(x.device, sharded=False)))",
    ),
    "metric": (
        300,
        "from lightning_ssl.metrics import KNNAccuracy; torch.manual_seed(0); made = KNNAccuracy(10, k=20);"
        "y, at = torch.randint(10, (100_000,)), torch.arange(100_000);"
        "rows = [torch.randn(1000, 512) for _ in range(100)];"  # 205 MB
        "[made.update(rows.pop(), y[i * 1000 :][:1000], at[i * 1000 :][:1000], split='bank') for i in range(100)];"
        "made.update(torch.randn(100, 512), y[:100], at[:100], split='query'); peak(made.compute)",
    ),
    "knn_predict": (
        400,
        "bank, y = torch.randn(50_000, 512), torch.randint(0, 10, (50_000,));"
        "queries = torch.randn(4_000, 512); peak(lambda: F.knn_predict(queries, bank, y, 10))",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_peak_memory(name):
    """In a process of its own: the peak above what stood there before stays under the limit, in MB."""
    limit, body = CASES[name]
    script = textwrap.dedent(
        """
        import resource, torch
        import lightning_ssl.functional as F

        def peak(call):
            F.uniformity(torch.randn(600, 512)); F.knn_predict(torch.eye(9), torch.eye(9), torch.arange(9), 9)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            call()
            print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
        """
    )
    command = [sys.executable, "-c", script + body]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < limit

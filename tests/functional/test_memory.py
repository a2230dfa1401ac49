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

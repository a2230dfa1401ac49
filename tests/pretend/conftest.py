from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch.utils.backend_registration as registration

if not hasattr(registration, "_setup_privateuseone_for_python_backend"):
    collect_ignore_glob = ["test_*.py"]  # torch before 2.10


@pytest.fixture(scope="session")
def on_device():
    """Calls a function of `tests.pretend.cases` in a process that has the device; what it returns must pickle."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        yield lambda function, *args, **kwargs: process.submit(function, *args, **kwargs).result(timeout=300)

import pytest
import torch


def pytest_configure(config):
    torch.set_num_threads(1)  # the suite runs one process a core


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)

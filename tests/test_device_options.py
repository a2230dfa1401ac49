"""What is exact stays exact, whatever precision a run allows its networks."""

import pytest
import torch

from lightning_ssl.callbacks import Watcher
from lightning_ssl.data import Augment, augment
from lightning_ssl.precision import exact_products
from lightning_ssl.runs.device import DeviceOptions
from tests.callbacks.harness import trainer
from tests.methods.helpers import loader
from tests.pretend.cases import method


@pytest.fixture
def tf32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def test_products_are_exact_inside_and_as_they_were_after(tf32):
    with pytest.raises(RuntimeError, match="here"), exact_products():
        assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cudnn.allow_tf32
        raise RuntimeError("here")
    assert torch.get_float32_matmul_precision() == "high"


def test_augmentation_is_exact_where_networks_are_not(tf32, monkeypatch):
    seen, make = [], augment.cached.carry_out
    monkeypatch.setattr(
        augment.cached, "carry_out", lambda *a: (seen.append(torch.get_float32_matmul_precision()), make(*a))[1]
    )
    Augment("simclr")(torch.randint(256, (4, 3, 16, 16), dtype=torch.uint8))
    assert seen == ["highest"] * 2


def test_options_hold_for_the_run_and_diagnostics_stay_exact():
    inside, outside = [], []

    class Watch(Watcher):
        def measure(self, rows):
            inside.append(torch.get_float32_matmul_precision())
            return {"rows": float(len(rows))}

        def on_train_batch_start(self, *args):
            super().on_train_batch_start(*args)
            outside.append(torch.get_float32_matmul_precision())

    model = method("BYOL")
    options = DeviceOptions(channels_last=True, matmul_precision="high")
    trainer([options, Watch("projector", every_n_steps=1)]).fit(model, loader(2))
    assert set(inside) == {"highest"} and set(outside) == {"high"}
    assert torch.get_float32_matmul_precision() == "highest"
    filters = model.backbone.layers[0].weight
    assert filters.is_contiguous(memory_format=torch.channels_last)


def test_a_precision_that_is_none():
    with pytest.raises(ValueError, match="`matmul_precision` must be one of highest, high, medium, got 'tf32'"):
        DeviceOptions(matmul_precision="tf32")

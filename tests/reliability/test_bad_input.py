"""Wrong uses, each with what answers it: the exit code or the exception, and the words a person needs to mend it."""

import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

from lightning_ssl import callbacks, functional, metrics
from lightning_ssl.data import HLTMDataModule, ImageDataModule, MixtureDataModule
from lightning_ssl.methods import BYOL, RAFT, BarlowTwins, DirectPred, SimCLR, SimSiam
from lightning_ssl.runs.checkpoint import CheckpointError, CheckpointFiles
from lightning_ssl.runs.cli import main
from lightning_ssl.theory import ema, hltm, linear
from lightning_ssl.theory.mixture import TwoLayer
from tests.callbacks import strangers
from tests.callbacks.harness import trainer
from tests.methods.helpers import small

# Should a wrong use be taken for a right one, it must not train for a minute.
SHORT = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=1", "--trainer.limit_val_batches=0"]
SHORT += ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", "--trainer.accelerator=cpu"]

COMMANDS = [
    # what is typed, exit code, words
    ("", 2, "give a command: fit, validate, test, predict, doctor, runs, compare, reproduce, dashboard, completion"),
    ("fti", 2, "'fti' .choose from 'fit', 'validate'"),
    ("fit extra", 2, "no flag extra; `lightning-ssl fit --help`"),
    ("fit --modl BYOL", 2, "no flag --modl .did you mean '--model'"),
    ("fit --model", 2, "--model: expected one argument"),
    ("fit --model Byoll", 2, "no 'Byoll' .did you mean 'BYOL'.*SimCLR.*import path"),
    ("fit --model BYOL --model.momentm 0.9", 2, "BYOL has no option 'momentm' .did you mean 'momentum'"),
    ("fit --model BYOL --model.momentum high", 2, "model.momentum must be float; got 'high'"),
    ("fit --model BYOL --model.momentum 1.5", 2, r"`momentum` must lie in \[0, 1\], got 1.5"),
    ("fit --model BYOL --model.predictor cubic", 2, "predictor must be one of mlp, linear, none; got 'cubic'"),
    ("fit --model.predictor mlp", 2, "DirectPred sets the weight of a linear predictor"),
    ("fit --model.backbone resnet19", 2, "`backbone` must be a module, one of .*small_conv.*got 'resnet19'"),
    ("fit --model.optimizer Adamm", 2, "no 'Adamm' .did you mean 'Adam'"),
    ("fit --model.optimizer.lr fast", 2, "optimizer.lr must be float.*got 'fast'"),
    ("fit --model.optimizer.learning_rate 0.1", 2, "SGD has no option 'learning_rate'.*Its options: params, lr"),
    ("fit --data ImageModule", 2, "did you mean 'ImageDataModule'"),
    ("fit --data.datset digits", 2, "no option 'datset' .did you mean 'dataset'"),
    ("fit --data.dataset cifar11", 2, "one of digits, cifar10.*got 'cifar11' .did you mean 'cifar10'"),
    ("fit --data.dataset cifar10 --data.root nowhere", 2, "root='nowhere' does not exist.*download=True"),
    (
        "fit --data.dataset image_folder --data.root uneven",
        2,
        r"class folders of train/ and test/ differ: \['a', 'b'\]",
    ),
    ("fit --data.batch_size many", 2, "data.batch_size must be int; got 'many'"),
    ("fit --data.batch_size 0", 2, "`batch_size` must be at least 1, got 0"),
    (
        "fit --data.views augment --data.augmentation simclrr",
        2,
        "`augmentation` must be a preset, got 'simclrr'; choose one of",
    ),
    ("fit --data.augmentation simclr", 2, "left out where views resample the nuisance.*set views='augment'"),
    ("fit --trainer.max_epochs ten", 2, "trainer.max_epochs must be int; got 'ten'"),
    ("fit --trainer.precision 12", 2, "trainer.precision must be one of .*bf16-mixed.*got '12'"),
    ("fit --trainer.accelerator tpuu", 2, "invalid accelerator name: `accelerator='tpuu'`. Available names"),
    ("fit --trainer.strategy dpp", 2, "invalid strategy name: `strategy='dpp'`"),
    ("fit --trainer.devices 0", 2, "devices='0'"),
    ("fit --trainer.logger Wandb", 2, "no 'Wandb' .did you mean 'WandbLogger'"),
    ("fit --trainer.callbacks+=KnnProbe", 2, "did you mean 'KNNProbe'.*UniformityAlignment"),
    ("fit --trainer.callbacks+=KNNProbe --trainer.callbacks.kk=3", 2, "KNNProbe has no option 'kk' .did you mean 'k'"),
    ("fit --trainer.callbacks+=KNNProbe --trainer.callbacks.k=0", 2, "`k` must be at least 1, got 0$"),
    ("fit --trainer.callbacks+=EffectiveRank --trainer.callbacks.features=projectr", 2, "Did you mean 'projector'"),
    ("fit --seed_everything x", 2, "seed_everything must be bool or int; got 'x'"),
    ("fit --name ../there", 2, "--name '../there' must be the name of one folder"),
    ("fit --root notes.txt", 2, "--root 'notes.txt' is a file: name a folder"),
    ("fit --ckpt_path last", 2, "no run in 'runs' has a checkpoint; set --root or --name"),
    ("fit --ckpt_path none.ckpt", 2, "'none.ckpt': there is no such file. Others in .: "),
    ("fit --ckpt_path notes.txt", 2, "'notes.txt' is cut off, damaged, or no checkpoint"),
    ("fit --ckpt_path pickled.ckpt", 2, "more than tensors and plain values.*Linear.*runs code from the file"),
    ("fit --ckpt_path foreign.ckpt", 1, "'foreign.ckpt' was not written by Lightning.*load_state_dict"),
    ("validate --ckpt_path none.ckpt", 2, "'none.ckpt': there is no such file"),
    ("predict --output no/such/place.npz", 2, "--output 'no/such/place.npz': its folder does not exist"),
    ("fit --config", 2, "--config needs a YAML file of options.*got 'nothing'"),
    ("fit --config none.yaml", 2, "no file '.*none.yaml', nor a shipped one"),
    ("fit --config digits/bylo.yaml", 2, "did you mean 'digits/byol.yaml'"),
    ("fit --config empty.yaml", 2, "--config needs a YAML file of options.*got 'nothing'"),
    ("fit --config list.yaml", 2, "--config needs a YAML file of options.*got '- a'"),
    ("fit --config unclosed.yaml", 2, "unclosed.yaml is no plain YAML: while parsing a flow mapping.*line 1"),
    ("fit --config binary.yaml", 2, "binary.yaml is no plain YAML"),
    (
        "fit --config code.yaml",
        2,
        "code.yaml is no plain YAML: could not determine a constructor for the tag.*os.system",
    ),
    ("fit --config misspelt.yaml", 2, "no option 'trainr.max_epochs' .did you mean 'trainer'"),
    ("fit --config typed.yaml", 2, "model.momentum must be float; got 'high'"),
    ("fit --config optimizer.yaml", 2, "torch.optim has no 'Adamm' .did you mean 'Adam'"),
    ("fit --config callback.yaml", 2, "KNNProbe has no option 'kk' .did you mean 'k'"),
    ("reproduce", 2, "give the NAME of an experiment, or --list"),
    ("reproduce table7", 2, "unknown experiment 'table7'. Did you mean 'table6'"),
    ("reproduce overlay", 2, "overlay needs --run LOGDIR"),
    ("reproduce overlay --run none", 2, "--run none is not a folder"),
    ("reproduce table6 --seed x", 2, "--seed: invalid int value: 'x'"),
    ("dashboard", 2, "required: --entity, --project"),
]

FILES = {
    "notes.txt": "hello, I am no checkpoint",
    "empty.yaml": "",
    "list.yaml": "- a\n- b\n",
    "unclosed.yaml": "model: {class_path: BYOL\n",
    "code.yaml": "model: !!python/object/apply:os.system ['touch harmed']\n",
    "misspelt.yaml": "trainr: {max_epochs: 3}\n",
    "typed.yaml": "model: {class_path: lightning_ssl.methods.BYOL, init_args: {momentum: high}}\n",
    "optimizer.yaml": "model: {class_path: BYOL, init_args: {optimizer: {class_path: torch.optim.Adamm}}}",
    "callback.yaml": "trainer: {callbacks: [{class_path: lightning_ssl.callbacks.KNNProbe, init_args: {kk: 3}}]}\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    here = tmp_path_factory.mktemp("wrong")
    for name, content in FILES.items():
        (here / name).write_text(content)
    (here / "binary.yaml").write_bytes(bytes(range(128, 256)))
    torch.save({"weight": torch.zeros(2)}, here / "foreign.ckpt")
    torch.save(torch.nn.Linear(2, 2), here / "pickled.ckpt")
    for name in ("train/a", "test/b"):
        (here / "uneven" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(here / "uneven" / name / "1.png")
    return here


@pytest.mark.parametrize(("typed", "code", "words"), COMMANDS, ids=[row[0] or "nothing" for row in COMMANDS])
def test_commands(folder, monkeypatch, capsys, typed, code, words):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["lightning-ssl"])
    monkeypatch.delenv("LIGHTNING_SSL_RUN", raising=False)
    args = typed.split()
    short = SHORT if args[:1] in (["fit"], ["validate"], ["predict"]) and args[-1] != "--model" else []
    if args[-1:] == ["--config"]:
        short = []
    with pytest.raises(SystemExit) as exit_:
        main([*args, *[flag for flag in short if flag.partition("=")[0] not in args]])
    message = capsys.readouterr().err
    assert exit_.value.code == code, message
    assert re.search(words, message.strip(), re.DOTALL), message
    assert "Traceback" not in message
    assert not Path("harmed").exists()


def rows(n=8, d=4):
    return torch.randn(n, d, dtype=torch.float64)


def fit(*watchers):
    trainer(list(watchers)).fit(strangers.MeanLoss(), strangers.loader(strangers.Pairs(16)))


def pair(labels=2, samples=12, image=None):
    """Probe loaders with this many classes."""
    x = torch.randn(samples, 3, 4, 4) if image is None else image
    data = TensorDataset(x, torch.arange(len(x)) % labels)
    return DataLoader(data, 4), DataLoader(data, 4)


def vanished_split(tmp_path):
    for name in ("train/a", "train/b"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name / "1.png")
    for name in ("val/a", "val/b"):
        (tmp_path / name).mkdir(parents=True)
    return ImageDataModule("image_folder", root=str(tmp_path)).setup()


def truncated(tmp_path):
    torch.save({"state_dict": {"w": torch.zeros(500)}, "pytorch-lightning_version": "2.6"}, tmp_path / "a.ckpt")
    (tmp_path / "b.ckpt").write_bytes((tmp_path / "a.ckpt").read_bytes()[:700])
    CheckpointFiles().load_checkpoint(tmp_path / "b.ckpt")


NAN = torch.full((4, 3), float("nan"))
# what is done, the exception, words
CALLS = {
    # methods
    "momentum above one": (
        lambda _: small(BYOL, momentum=1.5),
        ValueError,
        r"`momentum` must lie in \[0, 1\], got 1.5",
    ),
    "no such norm": (
        lambda _: small(BYOL, projector_norm="layer"),
        ValueError,
        "a norm must be .batch., .none.*got 'layer'",
    ),
    "no target to follow": (lambda _: small(BYOL, stop_gradient=False), ValueError, "momentum=0"),
    "an MLP to set directly": (lambda _: small(DirectPred, predictor="mlp"), ValueError, 'predictor="linear"'),
    "no such loss": (
        lambda _: small(SimCLR, loss="hinge"),
        ValueError,
        "`loss` must be simple.*'hinge'",
    ),
    "zero temperature": (lambda _: small(SimCLR, tau=0.0), ValueError, "`tau` must be positive .*got 0"),
    "one dimension": (lambda _: small(SimSiam, dim=1), ValueError, "`dim`.*got 1"),
    "negative trade-off": (lambda _: small(BarlowTwins, lambd=-1.0), ValueError, "`lambd`.*-1"),
    "wrong sign": (lambda _: small(RAFT, cross_model_weight=-1.0), ValueError, "BYOLPrime"),
    "no views": (lambda _: small(BYOL).training_step(torch.zeros(4, 3, 8, 8), 0), ValueError, "`views`.*got Tensor"),
    # data
    "no such dataset": (
        lambda _: ImageDataModule("mnist"),
        ValueError,
        "`dataset` must be one of digits.* got 'mnist'",
    ),
    "no batch": (lambda _: ImageDataModule(batch_size=0), ValueError, "`batch_size` must be at least 1, got 0"),
    "no views to make": (lambda _: ImageDataModule(num_views=0), ValueError, "`num_views` must be at least 1, got 0"),
    "more than there is": (lambda _: ImageDataModule(batch_size=10**6).train_dataloader(), ValueError, "at most 1437"),
    "nothing to resample": (lambda _: ImageDataModule("cifar10", views="resample"), ValueError, "set views='augment'"),
    "no such field": (
        lambda _: ImageDataModule("cifar10", augmentation={"blurr": 1.0}),
        ValueError,
        r"known fields, got \['blurr'\]; choose among \['blur",
    ),
    "a recipe too many": (
        lambda _: ImageDataModule("cifar10", augmentation=["none"] * 3),
        ValueError,
        "at most a recipe a view, got 3 for 2",
    ),
    "no such root": (lambda p: ImageDataModule("stl10", root=str(p / "x")).setup(), FileNotFoundError, "stl10_binary/"),
    "an empty test split": (vanished_split, FileNotFoundError, "val/ holds no image"),
    "a tree without levels": (lambda _: HLTMDataModule(depth=0), ValueError, "`depth` must be at least 1, got 0"),
    "polarity above one": (
        lambda _: HLTMDataModule(lower=1.5),
        ValueError,
        "`lower` and `upper` must satisfy .*got 1.5",
    ),
    "a batch above the draws": (
        lambda _: MixtureDataModule(draws=8),
        ValueError,
        "`batch_size` must be at most draws=8, got 128",
    ),
    "negative variance": (
        lambda _: MixtureDataModule(variance=-1.0),
        ValueError,
        "`variance` must not be negative, got -1.0",
    ),
    # checkpoints
    "a cut-off checkpoint": (truncated, CheckpointError, "b.ckpt' is cut off, damaged.*Others in .*a.ckpt"),
    # callbacks
    "no such place": (
        lambda _: fit(callbacks.UniformityAlignment("projectr")),
        MisconfigurationException,
        "`features` names 'projectr'.*Did you mean 'projector'",
    ),
    "a predictor without weights": (
        lambda _: fit(callbacks.EigenspaceAlignment("backbone.1")),
        MisconfigurationException,
        "has no weights",
    ),
    "a layer outside": (
        lambda _: fit(callbacks.CovarianceOperatorNorm(["predictor"])),
        MisconfigurationException,
        "lies neither in encoder='backbone' nor",
    ),
    "same keys": (
        lambda _: fit(*(callbacks.EffectiveRank("projector", every_n_steps=n) for n in (3, 7))),
        RuntimeError,  # Lightning's own, before anything runs: what a checkpoint keeps of them would be mixed up
        "`callback.state_key` must be unique",
    ),
    "same names": (
        lambda _: fit(*(callbacks.EffectiveRank(place, name="rank") for place in ("projector", "backbone"))),
        MisconfigurationException,
        "give each its own `name=`",
    ),
    "never": (lambda _: callbacks.EffectiveRank(every_n_steps=None), ValueError, "both are None"),
    "every zeroth step": (
        lambda _: callbacks.UniformityAlignment(every_n_steps=0),
        ValueError,
        "`every_n_steps` must be a positive integer or None, got 0",
    ),
    "no neighbours": (lambda _: callbacks.KNNProbe(k=0), ValueError, "`k` must be at least 1, got 0"),
    "no penalty": (lambda _: callbacks.LinearProbe(l2=0.0), ValueError, "`l2` must be positive, got 0"),
    "no patience": (lambda _: callbacks.CollapseMonitor(patience=0), ValueError, "`patience`"),
    "frozen average": (lambda _: callbacks.DirectPredictor(rho=1.0), ValueError, "`rho`"),
    "a range for nothing": (lambda _: callbacks.PredictorReset(init="uniform"), ValueError, "`init_range`"),
    "no probe data": (
        lambda _: fit(callbacks.KNNProbe("backbone")),
        MisconfigurationException,
        r"`data` is missing.*data=\(train_loader, test_loader\)",
    ),
    "one loader": (
        lambda _: fit(callbacks.KNNProbe("backbone", pair()[:1])),
        MisconfigurationException,
        r"pair \(train_loader, test_loader\)",
    ),
    "an empty split": (
        lambda _: fit(callbacks.LinearProbe("backbone", pair(image=torch.zeros(0, 3, 4, 4)))),
        MisconfigurationException,
        "set is empty; pass `data=`",
    ),
    "unlabelled": (
        lambda _: fit(callbacks.KNNProbe("backbone", [DataLoader(TensorDataset(torch.zeros(4, 3, 4, 4)))] * 2)),
        MisconfigurationException,
        r"must yield \(image, label\).*got a list of",
    ),
    # metrics
    "nothing seen": (lambda _: metrics.Uniformity().compute(), ValueError, "seen no rows.*call `update`"),
    "non-finite features": (lambda _: metrics.EffectiveRank().update(NAN), ValueError, "non-finite rows, the first at"),
    "a map for features": (lambda _: metrics.SecondMoment().update(rows()[None]), ValueError, "flatten or pool it"),
    "integers": (lambda _: metrics.Uniformity().update(torch.ones(4, 2).int()), ValueError, "convert it with .float"),
    "unequal views": (lambda _: metrics.Alignment().update(rows(4), rows(5)), ValueError, "must have the same shape"),
    # functional
    "a row alone": (
        lambda _: functional.uniformity(rows(1)),
        ValueError,
        "at least 2 rows, got 1; pass a larger batch",
    ),
    "a zero row": (lambda _: functional.alignment(rows() * 0, rows()), ValueError, "all-zero rows.*no direction; drop"),
    "collapsed to the origin": (lambda _: functional.effective_rank(rows() * 0), ValueError, "all zero|all-zero"),
    "not square": (
        lambda _: functional.asymmetry(rows()),
        ValueError,
        r"`W` must be a square matrix, got shape \(8, 4\)",
    ),
    "labels beyond": (
        lambda _: functional.knn_predict(rows(), rows(), torch.arange(8), 4),
        ValueError,
        r"`labels` must lie in \[0, 4\), got 0 to 7.*raise `num_classes`",
    ),
    "one class": (
        lambda _: functional.fit_linear_probe(rows(), torch.zeros(8).long(), 2, 1e-3),
        ValueError,
        "one class only; a probe needs at least two",
    ),
    "no such pair weight": (
        lambda _: functional.pair_weight(rows(), "mse"),
        ValueError,
        "`loss` must be one of.*'mse'",
    ),
    "negatives of others": (
        lambda _: functional.info_nce_loss(torch.rand(4), torch.rand(5, 3), 0.5),
        ValueError,
        r"`r_neg` must have shape \[N\] or \[N, H\] with N = 4",
    ),
    "zero correlation": (lambda _: functional.direct_predictor(torch.zeros(3, 3)), ValueError, "positive eigenvalue"),
    "one direction": (
        lambda _: functional.covariance_operator_norms(torch.nn.Linear(4, 2).double(), [rows(), rows()], directions=1),
        ValueError,
        "`directions` must be at least 2, got 1",
    ),
    "unlikely classes": (
        lambda _: functional.error_rate_bound(torch.tensor(0.1), 4, [0.5, 0.1], 0.1),
        ValueError,
        "`class_probs` must be at least two probabilities that sum to 1",
    ),
    # theory
    "times that stand still": (
        lambda _: linear.ModeDynamics.isotropic(1).solve(torch.ones(1), torch.ones(1), [0.0]),
        ValueError,
        "`times` must be an increasing sequence",
    ),
    "a negative eigenvalue": (
        lambda _: linear.ModeDynamics.isotropic(1).solve(torch.ones(1), -torch.ones(1), [0.0, 1.0]),
        ValueError,
        "`s` must not be negative.*got -1",
    ),
    "no boundary": (
        lambda _: linear.separatrix(eta=10.0),
        ValueError,
        "`eta` must be below .*got 10.0.*collapses",
    ),
    "no isolated points": (lambda _: linear.fixed_points(0.0), ValueError, "`eta` must be positive, got 0"),
    "no such average": (lambda _: ema.growth_rate(0.1, 2.0, 1.0), ValueError, r"`eta`.*in \(0, 1\], got 0.1 and 2.0"),
    "no such latent": (
        lambda _: hltm.lucky_nodes(torch.ones(2), torch.ones(2), -1.0, 0.1),
        ValueError,
        "`c` must not be negative.*got -1.0",
    ),
    "a network without runs": (lambda _: hltm.HLTMNetwork(runs=0), ValueError, "`runs` must be at least 1, got 0"),
    "no such two-layer loss": (
        lambda _: TwoLayer(loss="mse"),
        ValueError,
        "`loss` must be 'nce' or 'simple'",
    ),
}


@pytest.mark.parametrize("what", CALLS)
def test_calls(what, tmp_path):
    call, exception, words = CALLS[what]
    with pytest.raises(exception) as caught:
        call(tmp_path)
    assert re.search(words, str(caught.value), re.DOTALL), caught.value


def test_there_are_enough_of_them():
    assert len(COMMANDS) + len(CALLS) >= 120

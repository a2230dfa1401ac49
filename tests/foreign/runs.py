"""One run that is caught, one that is watched, and the comparison of what they say."""

from __future__ import annotations

import atexit
import importlib
import math
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_ssl.callbacks import (
    CollapseMonitor,
    CorrelationBound,
    CovarianceOperatorNorm,
    EffectiveRank,
    EigenspaceAlignment,
    KNNProbe,
    LinearProbe,
    RepresentationCircle,
    UniformityAlignment,
)
from tests.foreign import data, truth
from tests.foreign.case import Built, Case, Operator
from tests.foreign.truth import Call, Caught, Snapshot, Tape

ARGUMENTS = ("views", "pairing", "layout", "target", "features", "encoder", "output", "layers", "held_out", "samples")
SEED = 7

_root = tempfile.mkdtemp(prefix="foreign_")
atexit.register(shutil.rmtree, _root, ignore_errors=True)


def build(case: Case) -> Built:
    torch.manual_seed(SEED)
    return case.build()


def trainer(case: Case, callbacks: list[Any], logger: Any = False, **kwargs: Any) -> Any:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "default_root_dir": tempfile.mkdtemp(dir=_root),
        "max_epochs": 1,
        "limit_train_batches": data.STEPS,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1000,
    }
    return importlib.import_module(case.package).Trainer(callbacks=callbacks, logger=logger, **{**settings, **kwargs})


def loaders(case: Case, built: Built, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """What `fit` gets: the case's own data, in its own order; with several ranks each has its share of every batch."""
    if built.datamodule is not None:
        return {"datamodule": built.datamodule}

    def load(items: data.Items) -> DataLoader:
        sampler = DistributedSampler(items, ranks, rank, shuffle=False) if ranks > 1 else None
        return DataLoader(items, batch_size=case.batch // ranks or None, sampler=sampler)

    found = {"train_dataloaders": load(built.train)}
    return found if built.val is None else {**found, "val_dataloaders": load(built.val)}


def fit(case: Case, built: Built, callbacks: list[Any], logger: Any = False, rank: int = 0, ranks: int = 1) -> Any:
    """Train; with several ranks on the process group that is there already."""
    settings: dict[str, Any] = {}
    if ranks > 1:
        group = {"LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": ranks, "MASTER_PORT": 29500}
        os.environ.update({key: str(value) for key, value in group.items()}, MASTER_ADDR="localhost")
        settings = {"devices": ranks, "strategy": "ddp_find_unused_parameters_true", "use_distributed_sampler": False}
    run = trainer(case, callbacks, logger, **settings)
    torch.manual_seed(SEED + rank)
    run.fit(built.module, **loaders(case, built, rank, ranks))
    return run


def history(package: str) -> Any:
    """A logger of that package which keeps everything."""
    base = importlib.import_module(f"{package}.loggers").Logger

    class History(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.rows: list[tuple[int, dict[str, float]]] = []

        name, version, save_dir = "history", "0", None

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.rows.append((int(step or 0), dict(metrics)))

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

        def series(self, key: str) -> list[tuple[int, float]]:
            return [(step, float(row[key])) for step, row in self.rows if key in row]

    return History()


# The run that is caught ----------------------------------------------------------------------------------------------


def catch(case: Case) -> Caught:
    """Train without any callback of ours, and keep what the named submodules did."""
    built = build(case)
    paths = [case.features, case.target, case.predictor, case.operator.output if case.operator else None]
    tape = Tape(built.module, [path for path in paths if path])
    caught = Caught(module=built.module)
    base = importlib.import_module(case.package).Callback

    class Catch(base):  # type: ignore[misc, valid-type]
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            state = {name: value.detach().clone() for name, value in module.state_dict().items()}
            caught.snapshots.append(Snapshot(state, torch.get_rng_state(), batch, batch_idx))
            tape.current = {}
            caught.steps.append(tape.current)

        def on_before_backward(self, *args: Any) -> None:
            tape.on = False  # what is run again under checkpointing is no call of the step

        def on_after_backward(self, *args: Any) -> None:
            tape.on = True

        def on_train_batch_end(self, *args: Any) -> None:
            tape.current = None

        def on_validation_batch_start(self, *args: Any) -> None:
            tape.current = {}
            caught.held_out.append(tape.current)

        def on_validation_batch_end(self, *args: Any) -> None:
            tape.current = None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        caught.trainer = fit(case, built, [Catch()])
    return caught


def views_of(case: Case, calls: dict[str, list[Call]], with_target: bool) -> list[Tensor]:
    rows = [truth.rows_of(call.left[0].double(), case.layout) for call in case.counts(calls.get(case.features, []))]
    if with_target and case.target:
        theirs = [call for call in calls.get(case.target, []) if not call.grad]
        rows += [truth.rows_of(call.left[0].double(), case.layout) for call in theirs]
    return case.views(rows)


def operator_truth(case: Case, operator: Operator, caught: Caught, step: int) -> dict[str, float]:
    twin = build(case).module
    snapshot = caught.snapshots[step]
    if operator.again is not None:
        twin.load_state_dict(snapshot.state)
        truth.hold_statistics(twin)
        with torch.random.fork_rng(devices=[]):
            views = operator.again(twin, snapshot.batch)
    else:
        calls = truth.run_again(twin, snapshot, caught.trainer, [operator.output])
        rows = [truth.rows_of(call.left[0], operator.layout) for call in case.counts(calls[operator.output])]
        views = (operator.views or case.views)(rows)
    weights = {layer: twin.get_submodule(layer).weight for layer in operator.layers}
    return truth.operator_values(views, weights, operator.samples)


def probe_truth(case: Case, module: Any) -> dict[str, float]:
    probed = case.probed
    assert probed is not None
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    with torch.no_grad():
        sides = []
        for items in (probed.bank, probed.queries):
            batch = next(iter(data.loader(items, len(items))))
            labels = batch["label"] if isinstance(batch, dict) else batch[1]
            sides += [probed.rows(module, batch).flatten(1), labels]
    for part, mode in modes:
        part.training = mode
    return truth.probe_values(*sides, k=5, l2=1e-2)


def expected(case: Case, caught: Caught, with_target: bool = True) -> list[dict[str, float]]:
    """The true value of each key, step by step; the last entry holds what comes at the end of the epoch."""
    found: list[dict[str, float]] = []
    for step, calls in enumerate(caught.steps):
        values = truth.feature_values(views_of(case, calls, with_target))
        if step % 2:
            del values["circle/explained_variance"]
        if case.predictor is not None:
            seen = case.counts(calls[case.predictor])
            part = caught.module.get_submodule(case.predictor)
            weight = caught.snapshots[step].state[f"{case.predictor}.weight"] if isinstance(part, nn.Linear) else None
            inputs = torch.cat([call.entered[0] for call in seen])
            of_predictor = truth.predictor_values(inputs, torch.cat([call.left[0] for call in seen]), weight)
            keys = case.predictor_keys
            values |= {key: v for key, v in of_predictor.items() if not keys or key.partition("/")[2] in keys}
        if case.operator is not None and step % 2 == 0:
            values |= operator_truth(case, case.operator, caught, step)
        found.append(values)
    end: dict[str, float] = {}
    if case.held_out is not None and caught.held_out:
        batches = []
        for calls in caught.held_out:
            rows = [truth.rows_of(call.left[0].double(), case.layout) for call in calls.get(case.features, [])]
            batches.append(case.held_out(rows))
        end = truth.feature_values([torch.cat(parts) for parts in zip(*batches, strict=True)], "val")
    return [*found, end]


# The run that is watched ---------------------------------------------------------------------------------------------


@dataclass
class Watched:
    history: Any
    warnings: list[str]
    module: Any
    trainer: Any


def watchers(case: Case, bare: bool = False) -> list[Any]:
    """All callbacks that apply; `bare`: without any declared argument."""
    features = (case.bare_features or case.features) if bare else case.features
    told = {} if bare else dict(case.declared)
    quiet = {key: value for key, value in told.items() if key != "held_out"}
    found: list[Any] = [
        UniformityAlignment(features, every_n_steps=1, **told),
        CorrelationBound(features, num_classes=truth.NUM_CLASSES, every_n_steps=1, picture_every=0, **told),
        EffectiveRank(features, every_n_steps=1, **told),
        CollapseMonitor(features, every_n_steps=1, **quiet),
        RepresentationCircle(features, every_n_steps=2, **quiet),
    ]
    if case.predictor is not None:
        found.append(EigenspaceAlignment(case.predictor, every_n_steps=1, picture_every=0))
    if case.operator is not None:
        operator = case.operator
        found.append(
            CovarianceOperatorNorm(
                list(operator.layers),
                operator.encoder,
                operator.output,
                samples=operator.samples,
                exact=True,
                every_n_steps=2,
                **({} if bare else operator.declared),
            )
        )
    if case.probed is not None:
        sides = tuple(data.loader(items, 10) for items in (case.probed.bank, case.probed.queries))
        places: dict[str, Any] = {} if case.probed.features is None else {"features": case.probed.features}
        told = {} if bare else case.probed.declared
        found.append(KNNProbe(case.probed.encoder, sides, k=5, num_classes=truth.NUM_CLASSES, **places, **told))
        found.append(LinearProbe(case.probed.encoder, sides, l2=1e-2, num_classes=truth.NUM_CLASSES, **places, **told))
    return found


def forget_warnings() -> None:
    """Warnings that are given once a process are given anew."""
    for name, module in list(sys.modules.items()):
        if name.startswith("lightning_ssl.callbacks"):
            given = getattr(module, "_warned", None)
            if hasattr(given, "clear"):
                given.clear()


def watch(case: Case, bare: bool = False) -> Watched:
    built = build(case)
    log = history(case.package)
    forget_warnings()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = fit(case, built, watchers(case, bare), log)
    texts = [str(warning.message) for warning in caught]
    return Watched(log, texts, built.module, run)


# The comparison ------------------------------------------------------------------------------------------------------


WHO = {
    "uniformity": "UniformityAlignment",
    "alignment": "UniformityAlignment",
    "l_cor": "CorrelationBound",
    "l_bound": "CorrelationBound",
    "effective_rank": "EffectiveRank",
    "feature_std": "EffectiveRank",
    "alive_dimensions": "EffectiveRank",
    "knn_top1": "KNNProbe",
    "linear_top1": "LinearProbe",
    "collapse": "CollapseMonitor",
    "circle": "RepresentationCircle",
    "predictor": "EigenspaceAlignment",
    "cov_op": "CovarianceOperatorNorm",
    "cov_op_trace": "CovarianceOperatorNorm",
    "cov_op_intra": "CovarianceOperatorNorm",
}


def who_logs(key: str) -> str:
    kind, _, quantity = key.partition("/")
    return WHO[kind] if kind in WHO else WHO[quantity]


def ours(watched: Watched) -> list[str]:
    """Warnings that come from the callbacks, not from Lightning, torch or the module."""
    return [text for text in watched.warnings if text.startswith(tuple(WHO.values()))]


def remedies(watched: Watched) -> set[str]:
    """The callbacks that warned and named an argument to pass, besides those in their own name."""
    found = set()
    for text in ours(watched):
        who, _, said = text.partition("): ")
        if any(re.search(rf"`{name}\b|\b{name}=", said) for name in ARGUMENTS) or "name a submodule" in said:
            found.add(who.partition("(")[0])
    return found


def wrong(key: str, value: float, true: Mapping[str, float]) -> bool:
    kind, _, layer = key.partition("/")
    if not kind.startswith("cov_op"):
        return not math.isclose(value, true[key], rel_tol=1e-4, abs_tol=1e-6)
    # A trace is a difference, and views without randomness have no variance: digits are those of the operator.
    return not math.isclose(value, true[key], rel_tol=1e-3, abs_tol=1e-4 * true[f"cov_op/{layer}"])


def compare(case: Case, caught: Caught, watched: Watched, bare: bool) -> list[str]:
    """What is wrong: a value that is not the true one, or a value that is missing without a word."""
    problems = []
    told = bool(case.declared or case.bare_features) and not bare
    feature_rule = ("value" if case.value else "either") if told else case.bare
    operator_rule = (
        "value" if case.operator and case.operator.value and (not bare or not case.operator.declared) else "either"
    )
    probe_rule = "value" if case.probed and case.probed.value and (not bare or not case.probed.declared) else "either"
    warned = remedies(watched)
    with_target = "target" in case.declared and not bare
    every = expected(case, caught, with_target)
    logged: dict[tuple[str, int], list[float]] = {}
    for step, row in watched.history.rows:
        for key, value in row.items():
            logged.setdefault((key, step), []).append(float(value))

    def judge(key: str, step: int, truths: Mapping[str, float], values: list[float], rule: str) -> None:
        true = truths.get(key)
        for value in values:
            if true is None:
                problems.append(f"step {step} {key}: logged {value:.6g}, there is none")
            elif rule == "none":
                problems.append(f"step {step} {key}: logged {value:.6g}, nothing was called there")
            elif wrong(key, value, truths):
                problems.append(f"step {step} {key}: logged {value:.6g}, truth {true:.6g}")
        if not values and true is not None:
            if rule == "value":
                problems.append(f"step {step} {key}: not logged, truth {true:.6g}")
            elif rule == "either" and who_logs(key) not in warned:
                problems.append(f"step {step} {key}: not logged, and no warning names an argument; truth {true:.6g}")

    def rule_of(key: str) -> str:
        kind = key.partition("/")[0]
        return operator_rule if kind.startswith("cov_op") else "value" if kind == "predictor" else feature_rule

    watched_kinds = ("train/uniformity", "train/alignment", "train/l_", "train/effective", "train/feature")
    for step, values in enumerate(every[:-1]):
        for key in values:
            judge(key, step, values, logged.get((key, step), []), rule_of(key))
        for (key, when), seen in logged.items():
            if when == step and key not in values and key.startswith(watched_kinds):
                judge(key, step, {}, seen, "none")
    ending = {
        key: [v for _, v in watched.history.series(key)] for key in {k for _, r in watched.history.rows for k in r}
    }
    for key in every[-1]:
        judge(key, data.STEPS, every[-1], ending.get(key, []), feature_rule)
    if case.held_out is not None:
        for key in ("val/alignment", "val/uniformity"):
            if key not in every[-1]:
                judge(key, data.STEPS, {}, ending.get(key, []), "none")
    if case.probed is not None:
        first, last = probe_truth(case, build(case).module), probe_truth(case, caught.module)
        for key in first:
            values = ending.get(key, [])
            judge(key, 0, first, values[:1], probe_rule)
            judge(key, data.STEPS, last, values[-1:], probe_rule)
    for step, verdict in watched.history.series("collapse/verdict") if case.verdict is not None else []:
        if verdict != case.verdict:
            problems.append(f"step {step} collapse/verdict: logged {verdict}, truth {case.verdict}")
    if bare and case.says and not any(case.says in text for text in ours(watched)):
        problems.append(f"no warning speaks of {case.says!r}")
    return problems

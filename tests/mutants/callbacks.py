"""When a callback looks, what it takes for views, what it says of them, and what it leaves alone."""

from tests.mutants import Mutant

MONITOR = "callbacks/collapse_monitor.py"
RULES = "tests/callbacks/test_collapse_monitor.py"
PAIR = "callbacks/_engine/pair.py"
PAIRS = "tests/callbacks/test_pair.py"
ENGINE = "tests/callbacks/test_engine.py"

MUTANTS = [
    # The verdict
    Mutant(MONITOR, "max(2, self.patience) :]", "2:]", RULES),
    Mutant(MONITOR, "if len(self._recent) < self.patience or", "if", RULES),
    Mutant(MONITOR, "not all(kind for kind, *_", "not any(kind for kind, *_", RULES),
    Mutant(MONITOR, "else 0.9)", "else 1.1)", RULES),
    Mutant(MONITOR, "std < self.complete / 2 else", "False else", RULES),
    Mutant(MONITOR, "min(self.complete, self._baseline / 2)", "self.complete", RULES),
    Mutant(
        MONITOR, "self._baseline = std if self._baseline is None else self._baseline", "self._baseline = std", RULES
    ),
    Mutant(MONITOR, "if self.stop and", "if", RULES),
    Mutant(MONITOR, "trainer.should_stop = True", "pass", RULES),
    Mutant(MONITOR, "flat = rank < min(self.dimensional, dim / 2)", "flat = False", RULES),
    Mutant(MONITOR, "min(self.dimensional, dim / 2)", "self.dimensional", RULES),
    Mutant(MONITOR, "min(found.centred.shape[1], len(rows) - 1)", "found.centred.shape[1]", RULES),
    Mutant(MONITOR, '"baseline": self._baseline,', '"baseline": None,', RULES),
    # When
    Mutant(
        "callbacks/diagnostic.py",
        "step // n > self._last_step // n)",
        "step > self._last_step)",
        f"{ENGINE} -k hooks_stay",
    ),
    Mutant(
        "callbacks/diagnostic.py",
        "places=self.places, name=self.name)",
        "places=self.places, name=self.name, steps=self.every_n_steps)",
        f"{ENGINE} -k another_interval",
    ),
    Mutant("callbacks/diagnostic.py", "self._warned.clear()", "pass", f"{ENGINE} -k second_fit"),
    Mutant("callbacks/watcher.py", "(self._looks - 1) % picture_every == 0", "True", f"{ENGINE} -k pictures"),
    Mutant(
        "callbacks/watcher.py",
        "        observatory(trainer).end(self)\n        if self._values:",
        "        if self._values:",
        f"{ENGINE} -k nothing_of_a_step",
    ),
    # What is recorded
    Mutant("callbacks/_engine/record.py", "_silent += 1", "pass", f"{ENGINE} -k order_of_callbacks"),
    Mutant(
        "callbacks/_engine/record.py",
        "return value.detach().clone()",
        "return value.detach()",
        f"{ENGINE} -k next_layer",
    ),
    Mutant(
        "callbacks/_engine/record.py",
        "[call for call in self.calls if call.grad] or",
        "self.calls or",
        "tests/callbacks/test_uniformity_alignment.py -k DictConcatenated",
    ),
    Mutant(
        "callbacks/_engine/record.py",
        "return used or calls",
        "return calls",
        "tests/foreign/test_values.py -k clean",
    ),
    Mutant("callbacks/_engine/record.py", "handle.remove()", "pass", f"{ENGINE} -k hooks_stay"),
    # Views
    Mutant(PAIR, "(1 in ratios or not ratios)", "False", PAIRS),
    Mutant(PAIR, "if torch.equal(torch.cat(group), x):", "if False:", PAIRS),
    Mutant(PAIR, "SURE = 3.3", "SURE = -9.0", PAIRS),
    Mutant(PAIR, "APART = 2.0", "APART = -99.0", PAIRS),
    Mutant(PAIR, 'if reading.kind != "interleaved"', "if True", PAIRS),
    Mutant(PAIR, "sure_of_best = best is not None and", "sure_of_best = best is not None or", PAIRS),
    Mutant(PAIR, "if _score(found, TARGET) < SURE:", "if False:", "tests/foreign/test_values.py -k moco_shuffled"),
    Mutant(
        "callbacks/watcher.py",
        "if self.paired and seen.views is None:",
        "if False:",
        "tests/callbacks/test_engine.py -k doubt",
    ),
    Mutant(
        "callbacks/watcher.py",
        "Declared(**held_out) if isinstance(held_out, Mapping) else Declared()",
        "declared",
        "tests/callbacks/test_engine.py -k clean_validation",
    ),
    Mutant(
        "callbacks/watcher.py",
        "max(0, min(here, own - batch_idx * batch_size))",
        "here",
        "tests/callbacks/test_uniformity_alignment.py -k number_of_ranks",
    ),
    # Ranks
    Mutant(
        "lightning_ssl/distributed.py", "* len(pieces) + r for r,", "+ r * 10**6 for r,", "tests/test_distributed.py"
    ),
    Mutant("lightning_ssl/distributed.py", "raise RankError(told) from problem", "pass", "tests/test_distributed.py"),
    Mutant(
        "lightning_ssl/metrics/evaluation.py",
        "positions[order[first]] = torch.arange(int(first.sum()), device=order.device)",
        "positions[order] = torch.arange(len(order), device=order.device)",
        "tests/metrics/test_metrics.py -k knn",
    ),
    # The replay
    Mutant(
        "callbacks/_engine/replay.py", "stack.enter_context(held_constant(", "str((", f"{ENGINE} -k batch_statistics"
    ),
    Mutant(
        "callbacks/_engine/replay.py",
        "if not off <= (5e-2 if half else 1e-3):",
        "if False:",
        f"{ENGINE} -k other_network",
    ),
    Mutant(
        "callbacks/_engine/replay.py",
        "torch.rsqrt(variance + eps) * (1 + eps) ** 0.5",
        "torch.rsqrt(variance + 2 * eps + 0.1)",
        "tests/callbacks/test_values.py -k covariance",
    ),
    Mutant(
        "callbacks/_engine/replay.py",
        "part.training = mode",
        "pass",
        "tests/callbacks/test_undisturbed.py -k 'bit_identical and not ranks'",
    ),
    Mutant("callbacks/_engine/replay.py", "value.copy_(kept)", "pass", f"{ENGINE} -k own_hooks"),
    # The layout
    Mutant(
        "callbacks/_engine/layout.py",
        'return "NLC" if module.batch_first else "LNC"',
        'return "NLC"',
        "tests/foreign/test_values.py -k recurrent",
    ),
    Mutant(
        "callbacks/_engine/layout.py",
        'return {3: "NCL", 4: "NCHW", 5: "NCDHW"}.get(x.ndim)',
        "return None",
        "tests/foreign/test_values.py -k series",
    ),
    # Probes
    Mutant(
        "callbacks/_engine/embedding.py",
        "trainer.state.stage = type(stage).VALIDATING",
        "pass",
        f"{ENGINE} -k transfer_hooks",
    ),
    Mutant(
        "callbacks/_engine/probe_data.py",
        "owner = holder if holder is not None and overrides(holder, name) else pl_module",
        "owner = pl_module",
        f"{ENGINE} -k transfer_hooks",
    ),
    Mutant(
        "lightning_ssl/metrics/evaluation.py",
        "correct.any(dim=1)",
        "correct.all(dim=1)",
        "tests/callbacks/test_probes.py -k scikit",
    ),
    Mutant(
        "callbacks/probe.py",
        "shares.moment == now and",
        "",
        "tests/callbacks/test_probe_shards.py -k weights_that",
    ),
    Mutant(
        "callbacks/probe.py",
        "found = self._pass(trainer, pl_module, split, [self, *others])",
        "found = self._pass(trainer, pl_module, split, others := [self])",
        "tests/callbacks/test_probe_shards.py -k images",
    ),
    Mutant(
        "callbacks/probe.py",
        "shares.halvings += 1",
        "raise error",
        "tests/callbacks/test_probe_shards.py -k short_in_one",
    ),
    Mutant(
        "lightning_ssl/metrics/evaluation.py",
        "path = fit(train.part(~chosen, together), l2, start)",
        "chosen, path = ~chosen, fit(train.part(~chosen, together), l2, start)",
        "tests/callbacks/test_probe_shards.py -k penalty",
    ),
    Mutant(
        "lightning_ssl/metrics/evaluation.py",
        "min(shots, len(own)) - 1",
        "min(shots, len(own)) - 2",
        "tests/callbacks/test_probe_shards.py -k shots",
    ),
    # What is logged
    Mutant(
        "callbacks/correlation_bound.py",
        "correlation_loss(rows, self.unbiased)",
        "correlation_loss(rows)",
        "tests/callbacks/test_engine.py -k wide",
    ),
    Mutant(
        "callbacks/eigenspace_alignment.py",
        "self._steps[::2], self._spectra[::2]",
        "self._steps, self._spectra",
        "tests/callbacks/test_engine.py -k thinned",
    ),
    Mutant(
        "callbacks/_action.py",
        "if trainer.global_step != self._global_step:",
        "if True:",
        "tests/callbacks/test_engine.py -k micro_batches",
    ),
]

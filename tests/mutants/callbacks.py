"""When a callback looks, what it takes for views, what it says of them, and what it leaves alone."""

from tests.mutants import Mutant

MONITOR = "callbacks/collapse_monitor.py"
JUDGE = "callbacks/_judge.py"
RULES = "tests/callbacks/test_collapse_monitor.py"
QUALITY = "tests/callbacks/test_feature_quality.py"
PAIR = "callbacks/_engine/pair.py"
PAIRS = "tests/callbacks/test_pair.py"
ENGINE = "tests/callbacks/test_engine.py"

MUTANTS = [
    # The verdict
    Mutant(JUDGE, "last = self.recent[-self.rules.patience :]", "last = self.recent[-1:]", RULES),
    Mutant(JUDGE, "if len(last) < self.rules.patience or", "if", RULES),
    Mutant(JUDGE, 'any(seen["kind"] == "healthy"', 'all(seen["kind"] == "healthy"', RULES),
    Mutant(JUDGE, "return change <= (1.1 if sure else 0.9)", "return change <= 1.1", RULES),
    Mutant(JUDGE, "sure = look.deviation < complete / 2 or", "sure =", RULES),
    Mutant(JUDGE, "min(complete, first.deviation / 2)", "complete", RULES),
    Mutant(JUDGE, "self.first = self.first or look", "self.first = look", RULES),
    Mutant(JUDGE, "if look.rank < flat:", "if False:", RULES),
    Mutant(JUDGE, "flat = min(rules.dimensional, look.limit / 2)", "flat = rules.dimensional", RULES),
    Mutant(JUDGE, "if self.main and noisy and", "if self.main and", RULES),
    Mutant(JUDGE, "half = rules.partial * self.most_alive", "half = 0.0", RULES),
    Mutant(JUDGE, "look.alive < rules.narrow * look.limit and not", "look.alive < 0 and not", RULES),
    Mutant(JUDGE, "and not self._opens(look)", "", RULES),
    Mutant(JUDGE, "or not look.noise > self.rules.noise:", ":", RULES),
    Mutant(JUDGE, "or _line(curve[TREND // 2 :])[0] > 0.8 * slope:", ":", RULES),
    Mutant(JUDGE, "if not threshold < now < start / 2:", "if not threshold < now:", RULES),
    Mutant(JUDGE, "m < ONE_PROTOTYPE * most", "m < 0", RULES),
    Mutant(JUDGE, "m - h < SAME_ASSIGNMENT * most", "m - h < 0", RULES),
    Mutant(MONITOR, "min(2 * unit.shape[1], MOST_ROWS)", "1", RULES),
    Mutant(MONITOR, "limit = min(dim, rows - 1, width)", "limit = min(dim, width)", RULES),
    Mutant(MONITOR, "if limit and not self._stopped and", "if not self._stopped and", RULES),
    Mutant(MONITOR, "self._stopped, trainer.should_stop = self.verdict.kind, True", "pass", RULES),
    Mutant(MONITOR, "rank_zero_warn if worse and place.main", "rank_zero_warn if worse", RULES),
    Mutant("callbacks/_dynamics.py", "when[0] is None or when[1] is None", "when[1] is None and False", RULES),
    Mutant(
        "callbacks/feature_quality.py",
        "        self._metric.reset()\n        return self._named",
        "        return self._named",
        QUALITY,
    ),
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
        "(place < 1).sum()",
        "(place < 2).sum()",
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
        "decide = train.part(lambda: shuffled(train.positions) < held_out, together)",
        "decide = test",
        "tests/callbacks/test_probe_shards.py -k penalty",
    ),
    Mutant(
        "lightning_ssl/metrics/evaluation.py",
        "min(shots, len(of_class)) - 1",
        "min(shots, len(of_class)) - 2",
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
        "callbacks/_engine/action.py",
        "if trainer.global_step != self._global_step:",
        "if True:",
        "tests/callbacks/test_engine.py -k micro_batches",
    ),
    Mutant(  # each rank's own part of a stream
        "callbacks/_engine/stream.py",
        "    return True\n\n\ndef read_by",
        "    return False\n\n\ndef read_by",
        "tests/callbacks/test_probe_shards.py -k share_or_split",
    ),
    Mutant(
        "callbacks/_engine/stream.py",
        "(places < self.samples).sum()",
        "size",
        "tests/callbacks/test_probe_shards.py -k stated_number",
    ),
    Mutant(
        "callbacks/_engine/stream.py",
        "len(x) == len(label) and not (x.ndim == 3 and len(label) == 1)",
        "False",
        "tests/callbacks/test_probe_shards.py -k share_or_split",
    ),
    Mutant(
        "callbacks/probe.py",
        "again > _REPEATED * taken",
        "again > taken",
        "tests/callbacks/test_probe_shards.py -k taken_for",
    ),
    Mutant(
        "callbacks/probe.py",
        "except Exception as error:  # also what reads a file may fail on one rank alone",
        "except KeyError as error:",
        "tests/callbacks/test_probe_shards.py -k cannot_read",
    ),
]

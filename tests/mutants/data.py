"""Which samples and views come, on which rank, and after a resume."""

from tests.mutants import Mutant

AUGMENT = "tests/data/test_augment.py"
FILES = "tests/data/test_sources.py"
PACKED = "tests/data/test_packed.py"

MUTANTS = [
    # Large views on a CPU, and files
    Mutant("lightning_ssl/data/cached.py", "before + (after > 0)", "before + 1", AUGMENT),
    Mutant("lightning_ssl/data/cached.py", "high[0] - low[0], low[1]", "high[0], low[1]", AUGMENT),
    Mutant("lightning_ssl/data/cached.py", "radius = max(self.radius[which])", "radius = 1", AUGMENT),
    Mutant("lightning_ssl/data/cached.py", "((0, 1, 2), (0, 2, 1),", "((0, 2, 1), (0, 1, 2),", AUGMENT),
    Mutant("lightning_ssl/data/cached.py", "if count == 0:", "if count <= 1:", AUGMENT),
    Mutant("lightning_ssl/data/cached.py", "[start:end]) > 1:", "[start:end]) > 9:", AUGMENT),
    Mutant("lightning_ssl/data/cached.py", "return self.loan() is None", "return True", AUGMENT),
    Mutant("lightning_ssl/data/cached.py", "    with _LOCK:", "    if True:", AUGMENT),
    Mutant("lightning_ssl/data/cached.py", "min(end, self.jittered)", "end", AUGMENT),
    Mutant("lightning_ssl/data/cached.py", "if len(_KEPT) < _KEEP:", "if True:", AUGMENT),
    Mutant(
        "lightning_ssl/data/transforms.py", "(first + 2 - back) % 3", "(first + 2) % 3", "tests/data/test_transforms.py"
    ),
    # Views on a device
    Mutant("lightning_ssl/data/packed.py", "_RANK = (0, 1, 3, 2, 4)", "_RANK = (0, 1, 2, 3, 4)", PACKED),
    Mutant(
        "lightning_ssl/data/packed.py", "((1, 2, 3), (0, 1, 2), (0, 1, 3),", "((1, 2, 3), (0, 1, 2), (0, 1, 2),", PACKED
    ),
    Mutant("lightning_ssl/data/packed.py", "_TOGETHER = 2**28", "_TOGETHER = 2**8", PACKED),
    Mutant(
        "lightning_ssl/data/packed.py",
        "where[getattr(plan, name) + view * batch]",
        "where[getattr(plan, name)]",
        PACKED,
    ),
    Mutant(
        "lightning_ssl/data/augment.py",
        "(hue_when * 6 + roles) * 6 + others, 144)",
        "(hue_when * 6 + roles) * 6, 144)",
        AUGMENT,
    ),
    Mutant("lightning_ssl/data/sources.py", "data[place + 9] in (1, 3)", "True", FILES),
    Mutant("lightning_ssl/data/sources.py", "if _plain_jpeg(data):", "if False:", FILES),
    Mutant("lightning_ssl/data/sources.py", "contextlib.suppress(RuntimeError)", "contextlib.suppress()", FILES),
    Mutant(
        "lightning_ssl/data/sources.py",
        "left : left + width].contiguous(",
        "left : left + width - 1].contiguous(",
        FILES,
    ),
    Mutant(
        "lightning_ssl/data/loader.py",
        "order[self.start :][self.rank :: self.num_replicas]",
        "order[self.rank * self.num_samples :][: self.num_samples]",
        "tests/data/test_image.py -k 'number_of_ranks or no_samples or epochs_differ'",
    ),
    Mutant(
        "lightning_ssl/data/loader.py",
        "size // world_size if even else",
        "-(-size // world_size) if even else",
        "tests/data/test_image.py -k 'number_of_ranks or no_samples or epochs_differ'",
    ),
    Mutant(
        "lightning_ssl/data/loader.py",
        "self.epoch = epoch if self.reshuffle else 0",
        "self.epoch = epoch",
        "tests/data/test_image.py -k 'number_of_ranks or no_samples or epochs_differ'",
    ),
    Mutant(
        "lightning_ssl/data/loader.py",
        "permutation(size, self.seed, self.epoch) if self.shuffle",
        "permutation(size, self.seed) if self.shuffle",
        "tests/data/test_image.py tests/data/test_rng.py -k 'order_of_its_own'",
    ),
    Mutant(
        "lightning_ssl/data/loader.py",
        'if self._resume is not None and self._resume["epoch"] == epoch:',
        "if self._resume is not None:",
        "tests/data/test_image.py -k 'resumed_run and 10 or saved_when'",
    ),
    Mutant(
        "lightning_ssl/data/loader.py",
        "self.sampler.start = start",
        "self.sampler.start = 0",
        "tests/data/test_image.py -k 'resumed_run and 8-0'",
    ),
    Mutant(
        "lightning_ssl/data/loader.py",
        'self._position = {"epoch": epoch, "samples": start}',
        'self._position = {"epoch": epoch, "samples": 0}',
        "tests/data/test_image.py -k 'stopped_twice'",
    ),
    Mutant(
        "lightning_ssl/data/loader.py",
        'self._position["samples"] - self.untrained() * self.global_batch',
        'self._position["samples"]',
        "tests/data/test_image.py -k 'failed_is'",
    ),
    Mutant(
        "lightning_ssl/data/loader.py",
        "return max(samples // self.global_batch, whole - left), whole",
        "return samples // self.global_batch, whole",
        "tests/reliability/test_rank_changes.py",
    ),
    Mutant(
        "lightning_ssl/data/module.py",
        "recount_batches(self.trainer, batches, whole)",
        "pass",
        "tests/reliability/test_rank_changes.py",
    ),
    Mutant(
        "lightning_ssl/data/module.py",
        "loader.load_state_dict(self._resume)",
        "pass",
        "tests/data/test_image.py -k 'resumed_run and Scheduled-8-0'",
    ),
    Mutant(
        "lightning_ssl/data/module.py",
        'self._resume = state_dict.get("train")',
        "self._resume = None",
        "tests/data/test_image.py -k 'resumed_run and Scheduled-8-0'",
    ),
    Mutant(
        "lightning_ssl/data/module.py",
        'return kwargs["rank"], kwargs["num_replicas"]',
        'return 0, kwargs["num_replicas"]',
        "tests/data/test_image.py -k ranks_share",
    ),
    Mutant(
        "lightning_ssl/data/pipeline.py",
        "self.seed, split, epoch, view)",
        "self.seed, split, 0, view)",
        "tests/data/test_image.py tests/data/test_any_dataset.py -k 'epochs or augment_makes'",
    ),
    Mutant(
        "lightning_ssl/data/pipeline.py",
        "found = (row + step) % len(self.split)",
        "found = row",
        "tests/data/test_sources.py",
    ),
    Mutant(
        "lightning_ssl/data/augment.py",
        "uniforms(index.cpu(), NUM_UNIFORMS, self.seed, 0, epoch, view)",
        "uniforms(index.cpu(), NUM_UNIFORMS, self.seed, 0, 0, view)",
        "tests/data/test_any_dataset.py",
    ),
    Mutant(
        "lightning_ssl/data/augment.py",
        "recipes[view % len(recipes)] for view",
        "recipes[0] for view",
        "tests/data/test_image.py -k recipes",
    ),
    Mutant(
        "lightning_ssl/data/sources.py",
        "gray = np.asarray(image).astype(np.float64) / 257",
        "gray = np.asarray(image).astype(np.float64)",
        "tests/data/test_sources.py",
    ),
    Mutant(
        "lightning_ssl/rng.py",
        "state = _mix(state + _signed(part * 2 + 1) + _signed(_GOLDEN))",
        "state = state + _mix(state * 0 + _signed(part * 2 + 1) + _signed(_GOLDEN))",
        "tests/data/test_rng.py",
    ),
]

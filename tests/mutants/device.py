"""What a step costs, and what is exact in pieces, in half precision and over ranks."""

from tests.mutants import Mutant

STEP = "tests/methods/test_step.py"
SPAN = "tests/functional/test_span.py"

MUTANTS = [
    Mutant("lightning_ssl/methods/simclr.py", "r_neg.masked_fill(same, math.inf)", "r_neg", f"{STEP} -k mask"),
    Mutant(
        "lightning_ssl/methods/simclr.py",
        "* ((part.stop - part.start) / anchors)",
        "/ len(range(0, anchors, step))",
        f"{STEP} -k pieces",
    ),
    Mutant(
        "lightning_ssl/methods/simclr.py",
        "anchors = own + second * total",
        "anchors = own",
        f"{STEP} tests/methods/test_losses.py -k few",
    ),
    Mutant("lightning_ssl/methods/base.py", "            z = z.to(dtypes[0])", "            pass", f"{STEP} -k half"),
    Mutant("lightning_ssl/methods/barlow_twins.py", "<= 3 * sum(counts)", "<= 0", f"{STEP} -k barlow"),
    Mutant(
        "lightning_ssl/distributed.py",
        "grad * world_size() if ctx.same_after",
        "grad if ctx.same_after",
        f"{STEP} -k barlow",
    ),
    Mutant(
        "lightning_ssl/data/loader.py",
        "return (self.batch_size or 0) if even else 0",
        "return 0",
        f"{STEP} -k collectives",
    ),
    Mutant("lightning_ssl/functional/span.py", "+ 2 * outside.square().sum()).sqrt()", ").sqrt()", SPAN),
    Mutant("lightning_ssl/functional/span.py", "if len(s) < len(W):", "if False:", SPAN),
    Mutant("lightning_ssl/functional/roots.py", "ITERATIONS = 36", "ITERATIONS = 20", SPAN),
    Mutant(
        "lightning_ssl/precision.py",
        'torch.set_float32_matmul_precision("highest")\n    if conv',
        "pass\n    if conv",
        "tests/test_device_options.py",
    ),
    Mutant(
        "lightning_ssl/functional/estimate.py", "for _ in range(24):", "for _ in range(3):", "tests/pretend -k leading"
    ),
    Mutant(
        "lightning_ssl/functional/sketch.py",
        "probes, y.detach())[0].double()",
        "probes, y.detach())[0].double().cpu()",
        "tests/pretend -k due_callback",
    ),
    Mutant("lightning_ssl/functional/predictor.py", "1 if first == second else 2", "1", f"{SPAN} -k balance"),
    Mutant(
        "callbacks/covariance_operator_norm.py",
        "replay.check(floats.pop",
        "(floats.pop",
        "tests/callbacks/test_engine.py -k test_another_network_is_not_logged",
    ),
    Mutant("lightning_ssl/distributed.py", '"cpu:" in dist', '"" in dist', "tests/test_distributed.py -k hosts"),
]

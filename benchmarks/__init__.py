"""Side-by-side measurements against the peers and the limits: `python -m benchmarks [NAME...]`."""

NAMES = (
    "augmentation",
    "loading",
    "knn",
    "linear_probe",
    "probe_memory",
    "probe_scale",
    "covariance_operator",
    "uniformity",
    "overhead",
    "throughput",
    "hltm",
    "ddp",
    "step",
    "growth",
    "startup",
)
# With a command of its own: `python -m benchmarks.collapse_zoo`.
ALONE = ("collapse_zoo",)

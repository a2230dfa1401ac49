"""Side-by-side measurements against the peers and the limits: `python -m benchmarks [NAME...]`."""

NAMES = (
    "augmentation",
    "loading",
    "knn",
    "linear_probe",
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

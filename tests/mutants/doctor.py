"""The doctor's judgements."""

from tests.mutants import Mutant

BUGS = "tests/doctor/test_bugs.py"
MUTANTS = [
    Mutant(
        "lightning_ssl/doctor/verdict.py",
        "((1 / self.world, f",
        "((3 / self.world, f",
        f"{BUGS} -k detached_gather",
    ),
    Mutant(
        "lightning_ssl/doctor/verdict.py",
        "return same_loss and same_log",
        "return False",
        f"{BUGS} -k gather_dropped",
    ),
    Mutant(
        "lightning_ssl/doctor/steady.py",
        "return out.copy_(row.expand_as(out)) if len(out) else out",
        "return out",
        "tests/doctor/test_doctor.py -k steady",
    ),
    Mutant(
        "lightning_ssl/doctor/target.py",
        "best = (1 - share, misfit)",
        "best = (share, misfit)",
        "tests/doctor/test_doctor.py -k momentum",
    ),
    Mutant(
        "lightning_ssl/doctor/examine.py",
        "if not report.healthy or (complete and report.ended):",
        "if not report.healthy:",
        "tests/doctor/test_doctor.py -k leaves_the_others",
    ),
    Mutant(
        "lightning_ssl/doctor/views.py",
        "if share == 1.0:",
        "if share > 1.0:",
        f"{BUGS} -k identical",
    ),
    Mutant(
        "lightning_ssl/doctor/gradients.py",
        "if not any(n in learning for n in mine):",
        "if not any(n in trains for n in mine):",
        f"{BUGS} -k detached_features",
    ),
    Mutant(
        "lightning_ssl/runs/doctor.py",
        "sys.exit(0 if report.healthy else 1)",
        "sys.exit(0)",
        "tests/doctor/test_cli.py -k stranger",
    ),
]

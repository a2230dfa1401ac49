"""Run the benchmarks named (default: all), each in a process of its own, and put their tables into docs/benchmarks.md.

python -m benchmarks [NAME...]
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from benchmarks import NAMES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"among {', '.join(NAMES)}")
    names = parser.parse_args().names or list(NAMES)
    if unknown := sorted(set(names) - set(NAMES)):
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(NAMES)}")
    # Own processes: peak memory and imports of one must not be another's.
    failed = [
        name for name in names if subprocess.run([sys.executable, "-m", f"benchmarks.{name}", "--write"]).returncode
    ]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

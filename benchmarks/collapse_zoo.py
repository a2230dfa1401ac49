"""The collapse zoo: seeded runs, healthy ones and broken ones, and what the monitor says of each."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks._zoo import digits_data, image_data, record, zoo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["record"])
    parser.add_argument("--out", type=Path, required=True, help="a folder for the recordings")
    parser.add_argument("--images", type=Path, help="an image folder with `train` and `test`; without it, digits only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = {"digits": digits_data()}
    if arguments.images:
        data["images"] = image_data(arguments.images)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for run in zoo(bool(arguments.images)):
        file = arguments.out / f"{run.name}.npz"
        if not file.exists():
            start = time.process_time()
            with open(f"{file}.part", "wb") as part:
                np.savez(part, **record(run, data[run.data]))
            Path(f"{file}.part").rename(file)
            print(run.name, f"{time.process_time() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()

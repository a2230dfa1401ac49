"""The file that `predict` and `embed` write."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lightning_ssl.distributed import gather_objects, rank

Batches = list[dict[str, torch.Tensor]]


def write_embeddings(parts: Batches | dict[str, Batches], output: str) -> None:
    """Write what `predict_step` returned on all ranks to one .npz or .parquet file; called by all of them.

    Rows are in the order of the splits and of the indices, each once.

    Args:
        parts: This rank's batches, each with the rows' "features", "label" and "index": of the test split, or of each
            split by its name.
        output: The file, written by the first rank. Features are float32 whatever the run's precision.
    """
    splits = parts if isinstance(parts, dict) else {"test": parts}
    mine: dict[str, Any] = {}
    for split, batches in splits.items():
        rows = {name: torch.cat([part[name].cpu() for part in batches]) for name in ("features", "label", "index")}
        rows["features"] = rows["features"].float()  # numpy has no bfloat16
        mine[split] = {name: values.numpy() for name, values in rows.items()}
    gathered = gather_objects(mine)
    if rank() != 0:
        return
    found: dict[str, list[Any]] = {"features": [], "label": [], "index": [], "split": []}
    for split in splits:
        whole = {name: np.concatenate([part[split][name] for part in gathered]) for name in mine[split]}
        _, first = np.unique(whole["index"], return_index=True)
        for name, array in whole.items():
            found[name].append(array[first])
        found["split"].append(np.full(len(first), split))
    arrays = {name: np.concatenate(pieces) for name, pieces in found.items()}
    print(f"wrote {len(arrays['index'])} embeddings to {output}: arrays {', '.join(arrays)}")
    if not output.endswith(".parquet"):
        np.savez_compressed(output, **arrays)  # type: ignore[arg-type]
        return
    import pyarrow
    from pyarrow import parquet

    features = arrays.pop("features")
    lists = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(features.reshape(-1)), features.shape[1])
    parquet.write_table(pyarrow.table({"features": lists, **arrays}), output)

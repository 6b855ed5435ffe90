"""What tuning found for a GPU, data/tuned/<gpu>.json, as api.chosen wants it. An exported solution carries the table instead."""

import json
from functools import cache

import torch

from . import tables


@cache
def classes(device):
    """((M, ((stage, config as a dict), ...)), ...), M ascending and stages from the best, for a torch.device; () where nobody tuned for it."""
    if device.type != "cuda":
        return ()
    name = torch.cuda.get_device_name(device).split()
    return next((found for gpu, found in known().items() if gpu in name), ())


@cache
def known():
    """{gpu: its classes} of every GPU that somebody tuned for."""
    found = {}
    for path in (tables.DATA / "tuned").glob("*.json"):
        table = json.loads(path.read_text())
        found[path.stem] = tuple(
            (entry["M"], tuple((ranked["stage"], ranked["config"]) for ranked in (entry, entry["runner_up"]) if ranked))
            for entry in sorted(table["classes"], key=lambda entry: entry["M"])
        )
    return found

"""What separability.py and tsne.py share: the vectors of the classes as analyze wrote them, with their JSON.

safetensors is read by hand: 8 bytes of length, a JSON of places, then the numbers.
"""

import json
import os

import numpy as np

TYPES = {"F32": np.float32, "F64": np.float64, "I64": np.int64}


def tensors_of(path):
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        data = file.read()
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(data[slice(*one["data_offsets"])], TYPES[one["dtype"]]).reshape(one["shape"])
        for name, one in header.items()
    }


def models_of(directory, analysis):
    """The whole JSON, and of each model its part of it with its tensors."""
    with open(os.path.join(directory, analysis + ".json"), encoding="utf-8") as file:
        found = json.load(file)
    several = len(found["models"]) > 1
    models = []
    for i, model in enumerate(found["models"]):
        name = f"{analysis}.{i + 1}.safetensors" if several else f"{analysis}.safetensors"
        path = os.path.join(directory, name)
        if not os.path.exists(path):
            raise SystemExit(f"{path} is not there: run analyze with --keep-vectors true")
        models.append((model, tensors_of(path)))
    return found, models

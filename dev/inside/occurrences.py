"""What separability.py and tsne.py share: the vectors of the classes as analyze wrote them, with their JSON.

safetensors is read by hand: 8 bytes of length, a JSON of places, then the numbers.
"""

import glob
import json
import os

import numpy as np

TYPES = {"F32": np.float32, "F64": np.float64, "I64": np.int64}


def tensors_of(path):
    """The name of the model, and its tensors."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        data = file.read()
    model = header.pop("__metadata__")["model"]
    return model, {
        name: np.frombuffer(data[slice(*one["data_offsets"])], TYPES[one["dtype"]]).reshape(one["shape"])
        for name, one in header.items()
    }


def models_of(directory, analysis):
    """The whole JSON, and of each model its part of it with its tensors."""
    with open(os.path.join(directory, analysis + ".json"), encoding="utf-8") as file:
        found = json.load(file)
    # The numbers in the files' names also count models that were left out.
    paths = glob.glob(os.path.join(glob.escape(directory), analysis + "*.safetensors"))
    tensors = dict(map(tensors_of, paths))
    for model in found["models"]:
        if model["model"] not in tensors:
            raise SystemExit(f"no vectors of {model['model']} in {directory}: run analyze with --keep-vectors true")
    return found, [(model, tensors[model["model"]]) for model in found["models"]]

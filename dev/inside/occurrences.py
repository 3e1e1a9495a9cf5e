"""What separability.py and tsne.py share: the vectors of the classes as analyze wrote them, with their JSON."""

import glob
import json
import os

from values import metadata_and_tensors

def models_of(directory, analysis):
    """The whole JSON, and of each model its part of it with its tensors."""
    with open(os.path.join(directory, analysis + ".json"), encoding="utf-8") as file:
        found = json.load(file)
    # The numbers in the files' names also count models that were left out.
    paths = glob.glob(os.path.join(glob.escape(directory), analysis + "*.safetensors"))
    tensors = {metadata["model"]: own for metadata, own in map(metadata_and_tensors, paths)}
    for model in found["models"]:
        if model["model"] not in tensors:
            raise SystemExit(f"no vectors of {model['model']} in {directory}: run analyze with --keep-vectors true")
    return found, [(model, tensors[model["model"]]) for model in found["models"]]

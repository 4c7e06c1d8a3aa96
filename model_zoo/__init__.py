"""Named PyTorch models with seeded random weights, for checks that run over many models.

    entry = model_zoo.entry("torchvision/resnet18")
    model = entry.build().eval()
    args, kwargs = entry.inputs(batch=2)              # ((Tensor of (2, 3, 64, 64),), {})
    entry.loss(model(*args, **kwargs)).backward()

Nothing is downloaded, and the libraries are imported when one of their models is built, not before.

Each file imports only from those before it:

    errors, process, values -> packages -> sampling, losses, weights -> definition -> families/* -> catalogue -> __main__
"""

from model_zoo.catalogue import FAMILIES, entry, names
from model_zoo.definition import Entry
from model_zoo.errors import MissingPackageError, UnknownNameError

__all__ = ["FAMILIES", "Entry", "MissingPackageError", "UnknownNameError", "entry", "names"]

"""The tier `wild`: small models of packages that nobody here chose for being easy, for the scoreboard alone.

They are seeded as the zoo's are, and nothing is downloaded. Their packages stand in `constraints/wild.txt` and in no extra of Ariadne's;
`nox -s wild` makes an environment for them. Each file imports only from those before it::

    making                 an entry of the zoo's kind from a package, a name and options
    segmentation_models    segmentation-models-pytorch
    monai                  MONAI
    diffusers              diffusers
    torchaudio             torchaudio
    open_clip              OpenCLIP
    vit_pytorch            vit-pytorch
    x_transformers         x-transformers
    timm_others            architectures of timm that the zoo does not have
    transformers_others    families of transformers that the zoo does not have, by tiny configurations
    catalogue              all of them by name
"""

from conformance.wild.catalogue import entry, names

__all__ = ["entry", "names"]

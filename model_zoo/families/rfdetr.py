"""RF-DETR: the module inside the wrapper, called on a plain image tensor."""

from torch import nn

from model_zoo.definition import Entry
from model_zoo.packages import package
from model_zoo.process import quiet
from model_zoo.sampling import dense


def _nano() -> nn.Module:
    rfdetr = package("rfdetr")
    with quiet("rf-detr"):  # it warns that no weights are loaded, which is what is asked for
        model: nn.Module = rfdetr.RFDETRNano(pretrain_weights=None, device="cpu").model.model
    return model


ENTRIES = (
    # Training mode answers with 13 groups of queries, 3,900 rows in place of 300.
    Entry("rfdetr/nano", frozenset({"detection", "heavy"}), _nano, dense(3, 384, 384)),
)

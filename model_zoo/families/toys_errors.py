"""Toys that once ended in an error of torch's own: nested tensors within, results that grow what they write into, data pickled."""

import pickle  # noqa: TID251 - the toy that pickles what it computes
import warnings

import torch
from torch import Generator, Tensor, nn

from model_zoo.families.toys_kit import Toys
from model_zoo.sampling import call

toy = Toys()


def _padded(batch: int, generator: Generator) -> Tensor:
    """Tokens, 0 from some place on: the first row is full, and every one holds two at least."""
    tokens = torch.randint(1, 32, (batch, 6), generator=generator)
    lengths = torch.randint(2, 7, (batch, 1), generator=generator)
    lengths[0] = 6
    return torch.where(torch.arange(6) < lengths, tokens, 0)


class _Encoder(nn.Module):
    def __init__(self, layers: int = 2, norm_first: bool = False) -> None:
        super().__init__()
        self.embed, self.leave = nn.Embedding(32, 16), nn.Linear(16, 4)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=norm_first)
        self.encode = nn.TransformerEncoder(layer, layers, enable_nested_tensor=not norm_first)


@toy("padded_encoder", "int-input draws grad-mode", call(_padded))
class PaddedEncoder(_Encoder):
    """`nn.TransformerEncoder` with a padding mask: in eval mode its layers run on nested tensors."""

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.leave(self.encode(self.embed(tokens), src_key_padding_mask=tokens == 0).mean(1))
        return found


@toy("grown_result")
class GrownResult(nn.Module):
    """`out=` of an empty tensor, which the op makes as large as its result."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        kept = torch.empty(0)
        torch.mul(h.detach(), 3, out=kept)
        found: Tensor = self.leave(h + self.read(kept))
        return found

    def read(self, kept: Tensor) -> Tensor:
        """What goes on of it."""
        return kept


@toy("grown_sum")
class GrownSum(GrownResult):
    """The same, of which a sum alone is read: of what stood there before, there is one too."""

    def read(self, kept: Tensor) -> Tensor:
        """What goes on of it."""
        return kept.sum(-1, keepdim=True)


@toy("pickled", "rows-mixed no-graph")
class Pickled(nn.Module):
    """A mean of what a layer gives is pickled in forward, and what comes back goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        found: Tensor = self.leave(h + pickle.loads(pickle.dumps(h.detach().mean())))  # noqa: S301
        return found


@toy("quantized", "no-double no-autocast")
def _quantized() -> nn.Module:
    """A layer whose weights are integers in an object of torch's own, which is wrapped anew for each op; others are trained."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that another package goes on with it
        first = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 16)), {nn.Linear}, torch.qint8)
    return nn.Sequential(first, nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


ENTRIES = tuple(toy.entries)

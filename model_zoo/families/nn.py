"""Small models of plain torch, for checks that must be quick."""

from torch import Tensor, nn

from model_zoo.definition import Entry
from model_zoo.sampling import dense


class LSTMClassifier(nn.Module):
    """Two LSTM layers over (batch, time, 16), the last step classified into 10."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 32, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(32, 10)

    def forward(self, sequence: Tensor) -> Tensor:
        """(batch, time, 16) -> (batch, 10)."""
        states, _ = self.lstm(sequence)
        logits: Tensor = self.head(states[:, -1])
        return logits


def _mlp() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(10):
        linear = nn.Linear(64, 64)
        nn.init.kaiming_normal_(linear.weight)  # torch's default shrinks the signal to nothing over ten layers
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers)


def _transformer_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(d_model=32, nhead=4, dim_feedforward=64, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=2)


def _tags(*tags: str) -> frozenset[str]:
    return frozenset({"cheap", *tags})


ENTRIES = (
    # Under no_grad the CPU's LSTM is oneDNN's.
    Entry("nn/lstm_classifier", _tags("classification", "draws", "grad-mode"), LSTMClassifier, dense(12, 16)),
    Entry("nn/mlp10x64", _tags("classification"), _mlp, dense(64)),
    # Where nothing needs a gradient, its own Python takes a fused fast path.
    Entry("nn/transformer_encoder", _tags("features", "draws", "grad-mode"), _transformer_encoder, dense(10, 32)),
)

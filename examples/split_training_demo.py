"""Split training: the two halves have an optimizer each, and end up where the whole model does, bit for bit."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from ariadne import SplitSpec, prepare_split


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that both ways of training use."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def main() -> None:
    """Train a model with BatchNorm and Dropout whole and split, from the same weights and the same seed."""
    torch.manual_seed(0)
    whole = nn.Sequential(
        nn.Linear(5, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Linear(16, 16),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Linear(16, 2),
    ).train()
    model = copy.deepcopy(whole)
    data = [(torch.randn(batch, 5), torch.randn(batch, 2)) for batch in (8, 8, 6, 3, 8)]

    torch.manual_seed(1)
    optimizer = momentum(list(whole.parameters()))
    expected = []
    for x, targets in data:
        optimizer.zero_grad()
        loss = F.mse_loss(whole(x), targets)
        loss.backward()
        optimizer.step()
        expected.append(loss.detach())

    spec = SplitSpec(boundary="after:3", dynamic_batch=(2, 64), trainable=True)
    runtime = prepare_split(model, example_inputs=(torch.randn(4, 5),), split=spec)
    print(runtime)
    torch.manual_seed(1)
    prefix_optimizer = momentum(runtime.prefix_parameters())
    suffix_optimizer = momentum(runtime.suffix_parameters())
    for step, (x, targets) in enumerate(data):
        boundary = runtime.run_training_prefix(x)
        loss, boundary_grads = runtime.train_suffix(boundary, targets, loss_fn=F.mse_loss, optimizer=suffix_optimizer)
        runtime.backward_prefix(boundary, boundary_grads=boundary_grads, optimizer=prefix_optimizer)
        assert torch.equal(loss, expected[step])
        print(f"step {step}: batch {len(x)}, loss {loss:.6f}, the whole model's is the same in every bit")

    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    print(f"after {len(data)} steps all {len(whole.state_dict())} parameters and buffers are equal in every bit")


if __name__ == "__main__":
    main()

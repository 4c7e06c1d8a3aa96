"""Split inference: one half of a model here, the other there, and the answer of the whole model, bit for bit."""

import torch
from torch import nn

from ariadne import BoundaryPayload, SplitSpec, prepare_split


class Net(nn.Module):
    """Four layers; the second is convolved again, so two values are alive in the middle of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Conv2d(3, 8, 3, padding=1)
        self.layer2 = nn.Conv2d(8, 8, 3, padding=1)
        self.layer3 = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """(B, 3, H, W) -> (B, 10)."""
        x = self.layer1(image).relu()
        x = (x + self.layer2(x)).relu()
        x = (x + self.layer3(x)).relu()
        return self.head(x.mean((2, 3)))


def main() -> None:
    """Prepare once; replay at several batch sizes, across a wire, and cut elsewhere."""
    torch.manual_seed(0)
    model = Net().eval()
    spec = SplitSpec(boundary="after:layer2", dynamic_batch=(1, 64))
    runtime = prepare_split(model, example_inputs=(torch.randn(2, 3, 16, 16),), split=spec)
    print(runtime)
    print(f"\nthe plan:\n{runtime.plan}")
    print(f"\nthe suffix, as it runs:\n{runtime.suffix_source}")

    for batch in (1, 2, 7, 64):
        image = torch.randn(batch, 3, 16, 16)
        with torch.no_grad():
            whole = model(image)
        sent = runtime.run_prefix(image).to_bytes()  # on the device
        output = runtime.run_suffix(BoundaryPayload.from_bytes(sent))  # on the server
        assert torch.equal(output, whole)
        print(f"batch {batch:2}: {len(sent):7,} bytes sent, the output equals the model's in every bit")

    print("\nevery cut of the same plan:")
    image = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        whole = model(image)
    for candidate in runtime.candidates:
        if not candidate.safe:
            print(f"  {candidate.split_id:6} not safe: {candidate.reason}")
            continue
        elsewhere = runtime.resplit(candidate)
        assert torch.equal(elsewhere.run_suffix(elsewhere.run_prefix(image)), whole)
        print(f"  {candidate.split_id:6} {candidate.boundary_bytes:6.0f} bytes per sample: {', '.join(candidate.live)}")
    print(
        f"\nauto takes {runtime.resplit('auto').split_id}, the smallest boundary with a tenth of the ops on either side"
    )


if __name__ == "__main__":
    main()

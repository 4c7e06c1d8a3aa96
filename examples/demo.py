"""The main job on real models: split, replay and train ResNet-18, YOLOv8n and RF-DETR Nano; `nox -s demo` runs it.

Each model is captured in eval mode and in train mode and cut in the middle. The split must give what the whole model
gives, in every bit: outputs at several batch sizes; loss, gradients, parameters, buffers and RNG after a training step.
"""

import argparse
import sys
import time

from _common import (
    Progress,
    entries,
    module_of,
    prepare,
    replayed,
    table,
    time_against_model,
    trained,
)

import model_zoo

MODELS = ("resnet18", "yolov8n", "rfdetr")
TITLES = {"torchvision/resnet18": "ResNet-18", "ultralytics/yolov8n": "YOLOv8n", "rfdetr/nano": "RF-DETR Nano"}
HEAD = (
    "model",
    "cut at percent:50",
    "ops",
    "boundary bytes per sample",
    "largest difference: replay, training",
    "time, split / whole",
    "prepare s",
)
REPLAYED, TRAINED = (1, 2, 3), 2
PARTS = ("prepare for inference", "replay at batch 1, 2 and 3", "time it", "prepare for training", "train a step")


def main(argv: list[str] | None = None) -> int:
    """Print the table and return the exit status: 0 where all is equal, 1 where anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, help="short or full names of the zoo")
    parser.add_argument("--seconds", type=float, default=4.0, help="how long to time each model")
    options = parser.parse_args(argv)
    try:
        chosen = entries(options.models)
    except model_zoo.UnknownNameError as error:
        parser.error(str(error))
    progress = Progress(len(chosen) * len(PARTS))
    rows, failures = [], []
    for entry in chosen:
        title = TITLES.get(entry.name, entry.name)
        parts = iter(PARTS)

        progress.step(f"{title}: {next(parts)}")
        model = entry.build().eval()
        start = time.perf_counter()
        runtime = prepare(entry, model)
        seconds = time.perf_counter() - start
        progress.step(f"{title}: {next(parts)}")
        replay = [replayed(runtime, entry, batch) for batch in REPLAYED]
        progress.step(f"{title}: {next(parts)}")
        ratio = time_against_model(runtime, entry, options.seconds)

        progress.step(f"{title}: {next(parts)}")
        training = prepare(entry, entry.build().train())
        progress.step(f"{title}: {next(parts)}")
        steps = trained(training, entry, TRAINED)

        failures += [f"{title}: {found.words}" for found in (*replay, steps) if found.words]
        cut = runtime.candidate
        rows.append(
            (
                title,
                f"{cut.split_id} {module_of(runtime)}",
                f"{cut.prefix_ops} + {cut.suffix_ops}",
                f"{cut.boundary_bytes:,.0f}",
                f"{max(found.largest for found in replay):g}, {steps.largest:g}",
                f"{ratio:.2f}",
                f"{seconds:.1f}",
            )
        )
    progress.close()
    print(table(HEAD, rows))
    print(
        "\nTime: medians of interleaved calls at batch 1 on one thread. The models are small or take small images here."
    )
    print(*failures or ["Every split equals the whole model in every bit."], sep="\n")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())

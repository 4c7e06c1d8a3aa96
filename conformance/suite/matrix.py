"""The matrix: which cases there are for a model, decided by its tags, and by a module that a user would cut after."""

from __future__ import annotations

import zlib

import model_zoo
from conformance.checks import CHECKS
from conformance.suite.cases import MODES, Case

QUARTERS = ("q25", "q50", "q75")
EDGES = ("first", "last", "narrowest", "widest")
SMALL = ("nn", "toys")  # so small that every cut is trained, too
COMPILED = frozenset({"views", "inplace"})  # what inductor rewrites
REPLAYED, TRAINED, STEPS = (
    (1, 2, 3, 8),
    (2, 3),
    3,
)  # 8: no capture runs it, and it ends the range that splits are made for
NAMED = {
    "nn/lstm_classifier": "lstm",
    "nn/transformer_encoder": "layers.0",
    "timm/swin_tiny_patch4_window7_224": "layers.1",
    "timm/test_vit": "blocks.2",
    "torchvision/densenet121": "features.transition2",
    "torchvision/mobilenet_v3_large": "features.8",
    "torchvision/resnet18": "layer3",
    "torchvision/vgg11": "features",
    "transformers/bert_tiny": "embeddings",
    "transformers/t5_tiny": "encoder",
    "ultralytics/yolov8n": "model.9",
}


def cases(model: str) -> tuple[Case, ...]:
    """Every case of the suite for one model of the zoo, sorted."""
    entry = model_zoo.entry(model)
    found: list[Case] = []

    def add(check: str, **parameters: object) -> None:
        asked = CHECKS.get(check)
        if asked is None or not asked.applies(entry):
            return
        of_plans = asked.of_plans or parameters.get("backend", "generated") != "generated"
        if entry.has_graph(parameters.get("mode") == "train") or not of_plans:
            found.append(Case.of(check, model, **parameters))

    cheap, small = "cheap" in entry.tags, entry.family in SMALL
    # Where no tag says that the modes differ, one of them serves for what is compared in one mode only.
    telling = MODES if small else ("train",) if entry.tags & {"batchnorm", "draws"} else ("eval",)
    for mode in MODES:
        for cut in QUARTERS:
            for bs in REPLAYED:
                add("forward", cut=cut, bs=bs, mode=mode, backend="generated")
            for bs in TRAINED:
                add("train", cut=cut, bs=bs, mode=mode, backend="generated", steps=STEPS)
        for cut in EDGES if cheap else ():
            add("forward", cut=cut, bs=3, mode=mode, backend="generated")
        add("debug", cut="q50", bs=3, mode=mode)
        add("inputs", cut="q50", mode=mode)
        add("twice", cut="q50", mode=mode)
        add("left", mode=mode)
    for mode in telling:
        add("autocast", cut="q50", mode=mode)
        add("changes", mode=mode)
        add("guards", mode=mode)
        add("halves", cut="q50", mode=mode)
        add("parts", mode=mode)
    if model in NAMED:
        add("forward", cut=f"mod:{NAMED[model]}", bs=3, mode="eval", backend="generated")
        add("train", cut=f"mod:{NAMED[model]}", bs=2, mode="train", backend="generated", steps=STEPS)
    add("payload", cut="q50", bs=3)
    add("rows", bs=3)
    if entry.family != "toys" or zlib.crc32(model.encode()) % 4 == 0:  # it starts a process of its own
        add("source", cut="q50")
    if cheap:
        add("forward", cut="every", bs=3, mode="eval", backend="generated")
        # What aot_eager gives is held against a run in float64.
        for backend in ("eager",) if "no-double" in entry.tags else ("eager", "aot_eager"):
            add("forward", cut="q50", bs=3, mode="eval", backend=backend)
    if "compiled" in entry.tags:
        add("train", cut="q50", bs=3, mode="train", backend="inductor", steps=1)
    if small:
        if entry.family == "nn" or entry.tags & COMPILED:
            add("forward", cut="q50", bs=3, mode="eval", backend="inductor")
            for backend in ("eager", "aot_eager", "inductor"):
                add("train", cut="q50", bs=3, mode="eval", backend=backend, steps=1)
        # What draws is traced by rules of torch's own, which may draw otherwise than eager code.
        if entry.family == "nn" or "draws" in entry.tags:
            for backend in ("aot_eager", "inductor") if entry.family == "nn" else ("aot_eager",):
                add("train", cut="q50", bs=3, mode="train", backend=backend, steps=1)
        add("forward", cut="q50", bs=3, mode="train", backend="debug")
        for cut in ("first", "last"):
            add("payload", cut=cut, bs=2)
        for mode in MODES:
            add("train", cut="every", bs=3, mode=mode, backend="generated", steps=1)
            add("train", cut="rand:0", bs=2, mode=mode, backend="generated", steps=STEPS)
    if entry.dynamic or entry.batch_dim:  # others compare batches along dim 0, or run a part alone, at one size
        found = [case for case in found if case.check in ("forward", "train", "debug", "twice", "left")]
    return tuple(sorted(set(found)))


def all_cases() -> tuple[Case, ...]:
    """Every case of the suite, sorted."""
    return tuple(sorted(case for name in model_zoo.names() for case in cases(name)))

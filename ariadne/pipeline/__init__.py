"""Pipelines: a model in several parts, each a stage of torch's pipeline engine.

A model and where to cut it flow in; parts and stages flow out. The schedules, the launcher and the collectives are torch's own
(`torch.distributed.pipelining`), which is imported when a stage is first asked for. The files, in import order::

    alone       one part of a plan as a plan of its own
    choice      where to cut, and which parts share what
    balance     cuts with which the dearest part is cheapest
    flight      one micro-batch in one part: forward, and back
    part        a part as a module
    draws       random numbers: the whole model's, or a seed for each micro-batch
    micro       micro-batches: inputs parted, outputs put together
    pipeline    all parts of a model
    loaded      a part from its file
    message     what a hop carries
    channel     headers between ranks, and how an error ends all
    later       a walk back in two
    stage       a part as torch's `PipelineStage`
    steps       torch's schedules, with what a step needs around them
    idle        what a schedule leaves idle
"""

from ariadne.pipeline.balance import Costs, Layout, layouts
from ariadne.pipeline.choice import usable
from ariadne.pipeline.flight import Flight, back
from ariadne.pipeline.loaded import LoadedPart, finish, load_part, schedule
from ariadne.pipeline.part import Part
from ariadne.pipeline.pipeline import Pipeline, prepare_pipeline

__all__ = [
    "Costs",
    "Flight",
    "Layout",
    "LoadedPart",
    "Part",
    "Pipeline",
    "back",
    "finish",
    "layouts",
    "load_part",
    "prepare_pipeline",
    "schedule",
    "usable",
]

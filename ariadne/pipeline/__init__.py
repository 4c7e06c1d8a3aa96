"""Pipelines: a model in several parts, each a stage of torch's pipeline engine.

A model and where to cut it flow in; parts and stages flow out. The schedules, the launcher and the collectives are torch's own
(`torch.distributed.pipelining`), which is imported when a stage is first asked for. The files, in import order::

    alone       one part of a plan as a plan of its own
    choice      where to cut, and which parts share what
    flight      one micro-batch in one part: forward, and back
    part        a part as a module
    pipeline    all parts of a model
    message     what a hop carries
    stage       a part as torch's `PipelineStage`
"""

from ariadne.pipeline.part import Part
from ariadne.pipeline.pipeline import Pipeline, prepare_pipeline

__all__ = ["Part", "Pipeline", "prepare_pipeline"]

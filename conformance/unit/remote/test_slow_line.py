"""A line with delay, loss and a limit of its rate: the same bits, and boundaries in flight that make up for the delay."""

from __future__ import annotations

from pathlib import Path

import torch

from conformance.suite import slow_line


def test_replay_through_a_slow_line_is_the_model_s_and_gains_by_boundaries_in_flight(tmp_path: Path) -> None:
    torch.manual_seed(0)
    found = slow_line.replay(tmp_path, 24)
    assert found["equal"]
    assert found["ratio"] > 2  # 6.6 on a machine of two cores; here others may be at work


def test_training_through_a_slow_line_is_the_whole_model_s(tmp_path: Path) -> None:
    torch.manual_seed(0)
    found = slow_line.train(tmp_path, 6)
    assert found["equal"]
    assert found["steps"] == 6

"""A split on two sides of a line."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ariadne.remote import Server
from conformance.unit.remote_kit import beside
from conformance.unit.remote_pair import Pair, net


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    torch.manual_seed(0)
    return Pair(tmp_path_factory.mktemp("pair"), net().eval())


@pytest.fixture
def server(pair: Pair) -> Iterator[Server]:
    with beside(Server(pair.suffix, listen="127.0.0.1:0", log=None)) as running:
        yield running

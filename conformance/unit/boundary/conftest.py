"""A type that is registered for as long as a test runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ariadne.boundary import register_boundary_serializer
from ariadne.boundary.nodes import unregister_boundary_serializer
from conformance.unit.wire_kit import Angle


@pytest.fixture
def angle() -> Iterator[None]:
    register_boundary_serializer(
        Angle, lambda a: {"degrees": a.degrees}, lambda tree: Angle(tree["degrees"]), "degrees, v1"
    )
    yield
    unregister_boundary_serializer(Angle)

"""What holds for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import jobs


@pytest.fixture(autouse=True)
def no_program_outlives_its_test() -> Iterator[None]:
    """Also after a failure: a pipe that is left open is a warning, which fails whatever test comes next."""
    yield
    jobs.end_programs()

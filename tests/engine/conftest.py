"""One engine with DynChunk for all tests that need no setting of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scripts.reference import Server, serving
from tests.engine import asks


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The engine as users start it, with metrics. Who changes its budget sets it back; who wants no cache flushes it.

    Its tests are one xdist group, "guarded": there is one such engine in a run.
    """
    folder = tmp_path_factory.mktemp("guarded")
    environ = {"DYNCHUNK_BUDGET": str(asks.BUDGET), "DYNCHUNK_CHUNK_MIN": str(asks.FLOOR)}
    with serving(folder, *asks.STATIC, "--enable-metrics", **environ) as server:
        yield server

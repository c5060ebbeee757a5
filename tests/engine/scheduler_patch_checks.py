"""What the scheduler patch makes of an engine's numbers, with a scheduler that only has the attributes it reads."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from dynchunk import in_force, settings
from dynchunk.settings import SettingsError

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]  # the engine warns on import


@pytest.fixture(autouse=True)
def fresh_settings() -> Iterator[None]:
    settings.current.cache_clear()
    yield
    settings.current.cache_clear()


def scheduler(chunk: int | None, *, multimodal: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        chunked_prefill_size=chunk,
        page_size=64,
        model_config=SimpleNamespace(is_multimodal=multimodal, context_len=131_072),
    )


def test_a_multimodal_model_without_chunks_is_refused() -> None:
    """Where the engine itself gives chunking up for a multimodal model, the cure is another one than elsewhere."""
    from dynchunk.patches.scheduler import _resolve

    with pytest.raises(SettingsError, match=r"multimodal.*--model-impl"):
        _resolve(scheduler(None, multimodal=True))


def test_chunking_off_is_refused() -> None:
    """Without chunks there is nothing to bound."""
    from dynchunk.patches.scheduler import _resolve

    with pytest.raises(SettingsError, match=r"chunked prefill is off.*--chunked-prefill-size 2048"):
        _resolve(scheduler(None))


def test_the_scheduler_of_one_rank_decides() -> None:
    """Under data-parallel attention a flag of 4096 on four ranks is 1024 per rank; that is what counts and is shown."""
    from dynchunk.patches.scheduler import _resolve

    resolved = _resolve(scheduler(1024))
    assert resolved.static_tokens == resolved.limits.chunk_max == 1024
    assert "engine's chunk size 1,024" in resolved.describe()


def test_pipelines_keep_the_smaller_of_two_sizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the engine made a sizer of its own, it is asked as well."""
    from sglang.srt.managers.scheduler_components.dynamic_chunk_sizer import DynamicChunkSizer

    from dynchunk.sizer import BudgetSizer

    engine = SimpleNamespace(predict=lambda history_len: 640)
    assert callable(DynamicChunkSizer.predict)  # the interface that BudgetSizer stands in for
    limits = _limits()
    monkeypatch.setattr(in_force, "limits", limits)
    monkeypatch.setattr(in_force, "floors", {"DYNCHUNK_CHUNK_MIN": limits.chunk_min})
    ours = BudgetSizer(engine, lambda: in_force.cut()[0])
    assert ours.predict(0) == 640
    assert ours.predict(499_968) == 384


def _limits():
    from dynchunk.patches.scheduler import _resolve

    return _resolve(scheduler(2048)).limits


def test_rows_of_a_forward_are_read_before_padding_and_replays_are_left_out() -> None:
    """Decodes turned into extends of one token, and sliding-window replays, are no prefill."""
    from dynchunk.patches.model_runner import _prefill_rows

    batch = SimpleNamespace(rids=["a", "b"], extend_seq_lens_cpu=[512, 1], extend_prefix_lens_cpu=[4096, 77])
    assert _prefill_rows(batch) == [("a", 4096, 512), ("b", 77, 1)]
    one_each = vars(batch) | {"extend_seq_lens_cpu": [1, 1]}
    assert _prefill_rows(SimpleNamespace(**one_each, global_num_tokens_cpu=[2, 9])) is None
    assert _prefill_rows(SimpleNamespace(**one_each)) == [("a", 4096, 1), ("b", 77, 1)]
    assert _prefill_rows(SimpleNamespace(**vars(batch), encoder_swa_replay=True)) is None
    assert _prefill_rows(SimpleNamespace(**vars(batch) | {"extend_prefix_lens_cpu": None})) is None

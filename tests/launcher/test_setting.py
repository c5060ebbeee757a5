"""What is to be started, from the environment and a model's file, whatever stands in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher import environment, setting
from launcher.setting import Setting


def setting_of(folder: Path, config: Any = None, extra: str = "", **environ: str) -> Setting:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config or {}))
    return setting.of(*environment.read({"MODEL_PATH": str(folder), "EXTRA_ARGS": extra, **environ}))


def test_what_a_file_says(tmp_path: Path) -> None:
    """The path by the architecture and its ratios, the page by the model's type, the window."""
    v4 = {"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"], "sliding_window": 128}
    found = setting_of(tmp_path, v4 | {"compress_ratios": [0, 4, 128]})
    assert (found.path, found.page, found.window) == ("v4", 256, 128)
    assert setting_of(tmp_path, v4 | {"compress_ratios": [0, 1, 128]}).path == "v41-dev"
    found = setting_of(tmp_path, {"text_config": {"index_topk": 2048, "sliding_window": 64}})
    assert (found.path, found.page, found.window) == ("dsa", 1, 64)


@pytest.mark.parametrize(
    "config",
    [
        '{"sliding_window": "y"}',
        '{"sliding_window": 1e400}',
        '{"sliding_window": -128}',
        '{"sliding_window": true}',
        '{"text_config": 5}',
        '{"architectures": 5}',
        '{"architectures": []}',
        '{"architectures": {}}',
        '{"architectures": ["DeepseekV3"], "compress_ratios": 5}',
        '{"model_type": ["deepseek_v4"]}',
        "5",
        "null",
        "{",
        "[" * 100_000,
    ],
)
def test_an_odd_file(tmp_path: Path, config: str) -> None:
    """Nothing is known then, and nothing breaks."""
    found = setting_of(tmp_path, config)
    assert (found.path, found.page, found.window) == ("", 1, None)


def test_odd_ratios(tmp_path: Path) -> None:
    """Only whole numbers above 0 are ratios."""
    config = {"architectures": ["DeepseekV4ForCausalLM"], "compress_ratios": ["a", None, 0, -1, 4]}
    assert setting_of(tmp_path, config).path == "v4"
    assert setting_of(tmp_path, config | {"compress_ratios": 4}).path == "v41-dev"


def test_ranks_that_share(tmp_path: Path) -> None:
    """A chunk is divided among the ranks of data-parallel attention, its rows among those of context parallelism."""
    found = setting_of(tmp_path, extra="--enable-dp-attention --dp-size 4", CHUNKED_PREFILL_SIZE="4096")
    assert (found.dp_attention, found.chunk, found.context_parallel) == (4, 1024, 1)
    found = setting_of(tmp_path, extra="--enable-prefill-cp --attn-cp-size 4")
    assert (found.dp_attention, found.chunk, found.context_parallel) == (1, 2048, 4)
    assert setting_of(tmp_path, extra="--dp-size 4 --attn-cp-size 4").context_parallel == 1


@pytest.mark.parametrize(
    "extra",
    [
        "--enable-prefill-cp --attn-cp-size -4",
        "--enable-dp-attention --data-parallel-size 0",
        "--swa-full-tokens-ratio nan",
        "--swa-full-tokens-ratio -0.1",
        "--swa-full-tokens-ratio=1.5",
    ],
)
def test_flags_the_engine_will_refuse(tmp_path: Path, extra: str) -> None:
    """They are named, and count as not given."""
    found = setting_of(tmp_path, extra=extra)
    assert (found.dp_attention, found.context_parallel) == (1, 1)
    [problem] = found.unreadable_flags()
    assert problem.startswith("EXTRA_ARGS: --")
    assert setting_of(tmp_path, extra="--dp-size 2 --attn-cp-size 2 --swa-full-tokens-ratio 1").unreadable_flags() == []

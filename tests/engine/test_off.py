"""DYNCHUNK_MODE=off on the real engine is the stock engine; what it answers is what all other tests compare with."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from scripts.reference import Server
from scripts.verify import compare_record
from tests.engine import asks, stock, traffic

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("off")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A stock server that has been asked everything; its answers are the kept ones if there were none."""
    with stock.only_one(), stock.serving_stock(tmp_path_factory.mktemp("off")) as running:
        said, kept = stock.ask_everything(running), stock.kept_in()
        if kept.is_dir():
            shutil.rmtree(kept.with_suffix(".new"), ignore_errors=True)
            said.rename(kept.with_suffix(".new"))
        else:
            said.rename(kept)
        yield running


def test_off_is_the_stock_engine(server: Server) -> None:
    """Nothing of ours speaks, and every chunk but a prompt's last is the engine's own."""
    assert server.state() == {}
    assert not server.trace.exists()
    log = server.log.read_text()
    assert "dynchunk [" not in log
    assert "dynchunk-json" not in log
    sizes = [int(new) for new, _ in traffic.PREFILL_LINE.findall(log)]
    whole = sum(len(ask.tokens) // asks.CHUNK_TOKENS for ask in asks.LADDER.values())
    assert sizes.count(asks.CHUNK_TOKENS) >= whole
    assert max(sizes) == asks.CHUNK_TOKENS


def test_the_kept_answers_are_still_the_engines(server: Server) -> None:
    """What an earlier run kept is what the engine says today; a stale file would make every comparison empty.

    Where this run has kept them itself, one is asked again.
    """
    again = stock.kept_in().with_suffix(".new")
    if again.is_dir():
        said = stock.read_answers(again)
    else:
        server.flush()
        said = {ask.rid: traffic.answer(server, ask) for ask in (asks.LADDER[3_000],)}
    for rid, answer in said.items():
        traffic.assert_same(answer, stock.answers()[rid])


def test_answers_differ_from_prompt_to_prompt(server: Server) -> None:
    """Comparing answers means something: the model answers different prompts differently."""
    said = {tuple(answer["output_ids"][:8]) for answer in stock.answers().values()}
    assert len(said) == len(asks.EVERY) + len(asks.GROWING)


def test_the_record_says_how_the_engine_cut(server: Server) -> None:
    """The engine cut what `compare` asked into its own chunks: one warm-up, then every prompt."""
    logged = [int(new) for new, _ in traffic.PREFILL_LINE.findall(server.log.read_text())]
    about = compare_record.load(stock.record()).about
    lengths = asks.many_lengths_tokens()
    expected = []
    for n in (*lengths[: about.warmup_prompts], *lengths):
        expected += [asks.CHUNK_TOKENS] * (n // asks.CHUNK_TOKENS) + [n % asks.CHUNK_TOKENS]
    # A probe has one token.
    assert [new for new in logged if new > 1][: len(expected)] == expected

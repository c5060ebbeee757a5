"""The profiles' command lines are what the engine's own parser takes. Nothing is started."""

from __future__ import annotations

import json

import pytest

from launcher import serve
from tests.conftest import ROOT, clean_environ
from tests.engine import warm
from tests.launcher import profiles

pytestmark = pytest.mark.engine

PARSE = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
for argv in json.loads(sys.argv[1]):
    print(json.dumps(vars(parser.parse_args(argv)), default=str))
"""
READ_BACK = ("tp_size", "nnodes", "chunked_prefill_size", "context_length", "mem_fraction_static")


def test_the_engines_parser_takes_every_profile() -> None:
    """Each profile, plain and with context-parallel prefill, parsed by the supported engine, holds what was set."""
    settings = [make(name) for name in profiles.NAMES for make in (profiles.plain, profiles.context_parallel)]
    plans = [serve.plan(environ) for environ in settings]
    argv = [plan.argv[plan.argv.index("sglang.launch_server") + 1 :] for plan in plans]
    environ = clean_environ(CUDA_VISIBLE_DEVICES="")
    done = warm.run(["python", "-c", PARSE, json.dumps(argv)], env=environ, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    parsed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(parsed) == len(plans)
    for plan, found in zip(plans, parsed, strict=True):
        assert {key: found[key] for key in READ_BACK} == {key: getattr(plan.launch, key) for key in READ_BACK}
        assert found["enable_metrics"] is True
    for environ, found in zip(settings, parsed, strict=True):
        assert found["enable_prefill_cp"] is ("--enable-prefill-cp" in environ["EXTRA_ARGS"])
        assert found["attn_cp_size"] == (found["tp_size"] if found["enable_prefill_cp"] else 1)

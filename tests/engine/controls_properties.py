"""Updates under data-parallel attention, through the real request receiver; test_versions.py runs this once for
each engine version.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.scheduler_components import request_receiver

from dynchunk.agreement import Update
from dynchunk.patches import facts


@pytest.mark.parametrize("locally", [False, True])
def test_an_update_reaches_every_group(monkeypatch: pytest.MonkeyPatch, *, locally: bool) -> None:
    """From the first of all where the engine broadcasts controls to all, else from each group's first to its own."""
    posted: dict[str, Any] = {}
    configuration = SimpleNamespace(moe=SimpleNamespace(is_ep_scale_joiner=False))

    def broadcast(data: Any, rank: int, group: Any, src: int) -> Any:
        if rank == src:
            posted["controls"] = data
        return posted["controls"]

    monkeypatch.setattr(request_receiver, "broadcast_pyobj", broadcast)
    monkeypatch.setattr(request_receiver, "attn_cp_tp_broadcast_pyobj", lambda data: data)
    receiver = request_receiver.SchedulerRequestReceiver
    me = SimpleNamespace(_split_work_and_control_reqs=lambda reqs: receiver._split_work_and_control_reqs(None, reqs))
    reached = []
    for group in (0, 1):  # of one rank each
        parallel = SimpleNamespace(
            attn_dp_enabled=True,
            enable_dp_attention=True,  # its name up to 0.5.21
            attn_dp_rank=group,
            attn_tp_rank=0,
            attn_cp_rank=0,
            pp_rank=0,
            tp_size=2,
            enable_dp_attention_local_control_broadcast=locally,
            tp_group=SimpleNamespace(rank=group, ranks=[0, 1], cpu_group=None),
        )
        for module in (request_receiver, facts):
            monkeypatch.setattr(module, "get_parallel", lambda parallel=parallel: parallel)
            monkeypatch.setattr(module, "get_exec", lambda: configuration)
        me.ps, me.tp_group, me.tp_cpu_group = parallel, parallel.tp_group, None  # up to 0.5.21 they are its own
        own = [Update(1, "budget", (group,))] if facts.speaks_for_all(SimpleNamespace(ps=parallel)) else []
        reached.append([update.values for update in receiver._broadcast_reqs_across_ranks(me, own)])
    assert reached == ([[(0,)], [(1,)]] if locally else [[(0,)], [(0,)]])

"""For pipeline_ttft.py: prefills of the CPU reference platform take what a latency model says.

On two cores the time of a real chunk says more about page faults and about who else runs than about its size. Here each
layer's attention sleeps for BENCH_PACE_MS="a,b,c,gamma" (as in t = c + gamma L + b x + a (2 L x + x^2), ms; with one
layer a stage that is a stage's time) and computes nothing, so answers mean nothing. The engine, its scheduler and its
pipeline are the real ones.
"""

import os
import sys
import time
from pathlib import Path

PLATFORM = "dynchunk_reference.attention"


def _pace(module):
    a, b, c, gamma = map(float, os.environ["BENCH_PACE_MS"].split(","))
    backend = module.ReferenceAttentionBackend
    computed = backend.forward_extend

    def forward_extend(self, q, k, v, layer, forward_batch, *args, **kwargs):  # noqa: PLR0917 - the engine's
        if forward_batch.forward_mode.is_decode_or_idle():
            return computed(self, q, k, v, layer, forward_batch, *args, **kwargs)
        ms = c
        for sequence in self._sequences:
            x, prefix = sequence.rows, sequence.n_keys - sequence.rows
            ms += gamma * prefix + b * x + a * (2 * prefix * x + x * x)
        time.sleep(ms / 1000)
        return q.new_zeros(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)

    backend.forward_extend = forward_extend


if "BENCH_PACE_MS" in os.environ:
    sys.path.append(str(Path(__file__).resolve().parents[3] / "adapter"))
    from dynchunk.import_watch import ImportWatch

    sys.meta_path.insert(0, ImportWatch({PLATFORM: _pace}))

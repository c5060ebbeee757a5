"""Every function of SGLang that DynChunk relies on, and what must be true of it. One table, no engine import.

Held against live objects when the engine imports a module, against source text by `patches/check.py`.
The seams and parameter lists are the same in all tested versions unless a second list is given.
"""

from __future__ import annotations

from dynchunk.contract import Contract

TESTED_VERSIONS = ("0.5.23",)

SCHEDULER = "sglang.srt.managers.scheduler"
SCHEDULE_POLICY = "sglang.srt.managers.schedule_policy"
MODEL_RUNNER = "sglang.srt.model_executor.model_runner"

# Runs once on every rank when weights, graphs and pools are ready, before the first request.
INIT_SIZER = Contract("Scheduler.maybe_init_dynamic_chunk_sizer", ("self",), ("dynamic_chunk_sizer",))
# Not changed, but it must still ask the sizer, or installing one does nothing.
ASK_SIZER = Contract(
    "Scheduler._get_new_batch_prefill_raw",
    ("self, prefill_delayer_single_pass, running_batch",),
    ("dynamic_chunk_sizer", "predict", "chunked_req", "chunked_prefill_size"),
)
INTERNAL_STATE = Contract("Scheduler.get_internal_state", ("self, recv_req",))
ON_IDLE = Contract("Scheduler.on_idle", ("self",))
ADDER_INIT = Contract(
    "PrefillAdder.__init__",
    (
        (
            "self, page_size, tree_cache, token_to_kv_pool_allocator, running_batch, new_token_ratio, "
            "rem_input_tokens, rem_chunk_tokens, num_mixed_decode_tokens=0, "
            "priority_scheduling_preemption_threshold=0, max_prefill_bs=0, max_running_requests=None, "
            "prefill_max_requests=None, prefill_delayer_single_pass=None, dllm_config=None, waiting_queue_len=0, "
            "prefill_tile_block_m=64"
        ),
    ),
    ("rem_chunk_tokens",),
)
FORWARD = Contract(
    "ModelRunner.forward",
    (
        (
            "self, forward_batch, skip_attn_backend_init=None, pp_proxy_tensors=None, reinit_attn_backend=False, "
            "split_forward_count=1"
        ),
    ),
)

CONTRACTS = {
    SCHEDULER: (INIT_SIZER, ASK_SIZER, INTERNAL_STATE, ON_IDLE),
    SCHEDULE_POLICY: (ADDER_INIT,),
    MODEL_RUNNER: (FORWARD,),
}

"""Every function of SGLang that DynChunk relies on, and what must be true of it. One table, no engine import.

Held against live objects when the engine imports a module, against source text by `patches/check.py`.
The seams and parameter lists are the same in all tested versions unless a second list is given.
"""

from __future__ import annotations

from dynchunk.contract import Contract

# Each of these meets every contract below; tests/contract and tests/engine hold them to it. What decides at run time is
# the contract, not the number: a development build that meets them all is patched, and marked as untested.
TESTED_VERSIONS = ("0.5.20", "0.5.21", "0.5.22", "0.5.23")
_STOCK_SIZING_DIVERGES = (
    "its own chunk sizing gives the ranks of a tensor-parallel group different samples to fit, so they can come to "
    "different batches; and it has no sizer to take the place of. Use 0.5.20 or later"
)
HINT = f"tested with sglang {', '.join(TESTED_VERSIONS)}"
REFUSED_VERSIONS = {"0.5.18": _STOCK_SIZING_DIVERGES, "0.5.19": _STOCK_SIZING_DIVERGES}

SCHEDULER = "sglang.srt.managers.scheduler"
SCHEDULE_POLICY = "sglang.srt.managers.schedule_policy"
SCHEDULE_BATCH = "sglang.srt.managers.schedule_batch"
MODEL_RUNNER = "sglang.srt.model_executor.model_runner"
REQUEST_RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver"

# Runs once on every rank when weights, graphs and pools are ready, before the first request.
INIT_SIZER = Contract("Scheduler.maybe_init_dynamic_chunk_sizer", ("self",), ("dynamic_chunk_sizer",))
# Wrapped for whose pass it is; and it must still ask the sizer, or installing one does nothing.
PREFILL_PASS = Contract(
    "Scheduler._get_new_batch_prefill_raw",
    ("self, prefill_delayer_single_pass, running_batch",),
    (
        *("dynamic_chunk_sizer", "predict", "chunked_req", "chunked_prefill_size", "waiting_queue"),
        *("add_chunked_req", "add_one_req", "truncation_align_size", "new_chunked_req"),
    ),
)
INTERNAL_STATE = Contract("Scheduler.get_internal_state", ("self, recv_req",))
SET_INTERNAL_STATE = Contract("Scheduler.set_internal_state", ("self, recv_req",))
DISPATCHER = Contract("Scheduler.init_request_dispatcher", ("self",), ("_request_dispatcher",))
# An open request may sit out a pass: it is stored only when its chunk has grown it.
NEXT_BATCH = Contract(
    "Scheduler.get_next_batch_to_run",
    ("self, running_batch, last_batch",),
    ("chunked_req", "stash_chunked_request", "get_new_batch_prefill"),
)
# What a step of decoding may take from the cache that an open request was promised.
NEXT_DECODE = Contract(
    "ScheduleBatch.new_tokens_required_next_decode", ("self, selected_indices=None",), ("page_size", "kv_committed_len")
)
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
ADD_CHUNKED = Contract(
    "PrefillAdder.add_chunked_req", ("self, req",), ("rem_chunk_tokens", "can_run_list", "full_untruncated_fill_ids")
)
ADD_ONE = Contract("PrefillAdder.add_one_req", ("self, req, has_chunked_req, truncation_align_size",))
ADD_ONE_IGNORE_EOS = Contract(
    "PrefillAdder.add_one_req_ignore_eos", ("self, req",), ("rem_chunk_tokens", "new_chunked_req", "budget_state")
)
SELECT = Contract(
    "PrefillAdder._select_prefill_admission",
    (
        (
            "self, req, *, total_tokens, host_hit_length, swa_host_hit_length, truncation_align_size, "
            "has_chunked_req=False"
        ),
        "self, req, *, total_tokens, host_hit_length, swa_host_hit_length, truncation_align_size",  # 0.5.20
    ),
    ("rem_chunk_tokens", "page_size"),
)
PULL_REQUESTS = Contract("SchedulerRequestReceiver._pull_raw_reqs", ("self",))
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
    SCHEDULER: (INIT_SIZER, PREFILL_PASS, NEXT_BATCH, INTERNAL_STATE, SET_INTERNAL_STATE, DISPATCHER, ON_IDLE),
    SCHEDULE_BATCH: (NEXT_DECODE,),
    SCHEDULE_POLICY: (ADDER_INIT, ADD_CHUNKED, ADD_ONE, ADD_ONE_IGNORE_EOS, SELECT),
    REQUEST_RECEIVER: (PULL_REQUESTS,),
    MODEL_RUNNER: (FORWARD,),
}

# The sparse indexer. Held where the engine has the module: 0.5.20 has few of them, and no model loads them all.
_ATTENTION = "sglang.srt.layers.attention."
MQA_LOGITS = _ATTENTION + "mqa_logits_utils"
DSA_INDEXER = _ATTENTION + "dsa.dsa_indexer"

STATIC_SCORE_BUDGET = Contract("mqa_logits_static_budget_bytes", ("*, device_index",))
SCORE_BUDGET = Contract(
    "mqa_logits_budget_bytes", ("*, device_index, allow_sync",), ("mqa_logits_static_budget_bytes",)
)
DSA_SCORE_BUDGET = Contract(
    "Indexer._get_mqa_logits_budget_bytes", ("self, device_index",), ("_mqa_logits_budget_bytes",)
)

SPARSE_TABLE = _ATTENTION + "dsv4.v41_indexer.sparse_table"
V41_SCORING = _ATTENTION + "dsv4.v41_indexer.scoring"
SPARSE_PREFILL = _ATTENTION + "dsv4.sparse_prefill_utils"
V4_INDEXER = _ATTENTION + "dsv4.indexer"

PUBLISH_TABLE = Contract(
    "publish_prefill_table",
    ("*, data, kv, index_page_table, index_page_size, topk_blocks, out_positions",),
    ("score_tiles", "_build_prefill_table"),
)
BUILD_TABLE = Contract(
    "_build_prefill_table",
    ("*, blocks, compress_lens, page_table, page_size, request_ids, rows_per_request, q_dtype, valid_lens",),
)
FULL_TOPK = _ATTENTION + "dsv4.v41_indexer.full_topk"
DENSE_BLOCKS = _ATTENTION + "dsv4.v41_indexer.dense_blocks"
DENSE_TOPK = Contract("dense_prefill_topk", ("data, kv, *, out", "data, kv, *, topk"), ("score_tiles",))
DEEP_GEMM_PREFILL = Contract(
    "FullTopKIndexer._deep_gemm_prefill", ("self, inputs", "self, inputs, out"), ("dense_prefill_topk",)
)
PUBLISH_BLOCKS = Contract("_publish_prefill_blocks", ("*, data, kv, topk, topk_blocks, block_size",), ("score_tiles",))
CONSUME_BLOCKS = Contract("_consume_prefill_blocks", ("*, data, kv, topk, blocks, block_size",), ("score_tiles",))
SCORE_TILES = Contract("score_tiles", ("data, kv", "data, kv, *, width_align"), ("flat_index_logits_tiles",))
# 0.5.23 has the first class, earlier versions the second.
KV_BUFFER = Contract("SparsePrefillKVBuffer._reserve", ("self, num_tokens, dtype",), ("_buffer",))
KV_WORKSPACE = Contract("SparsePrefillWorkspace.get", ("self, num_tokens, dtype=torch.bfloat16",), ("_buffer",))
_FALLBACK = ("q_fp8, kvcache_fp8, weight, seq_lens, page_table, deep_gemm_metadata, max_seq_len, clean_logits=True",)

# What score limits that are no plain values rely on.
SCORE_LIMITS = {MQA_LOGITS: (STATIC_SCORE_BUDGET, SCORE_BUDGET), DSA_INDEXER: (DSA_SCORE_BUDGET,)}
# A method's contract is held where the engine has its class.
INDEXER_CONTRACTS = SCORE_LIMITS | {
    V41_SCORING: (SCORE_TILES, DENSE_TOPK),
    SPARSE_TABLE: (PUBLISH_TABLE, BUILD_TABLE),
    FULL_TOPK: (DEEP_GEMM_PREFILL,),
    DENSE_BLOCKS: (PUBLISH_BLOCKS, CONSUME_BLOCKS),
    SPARSE_PREFILL: (KV_BUFFER, KV_WORKSPACE),
    V4_INDEXER: (
        Contract("fp8_paged_mqa_logits_torch", _FALLBACK),
        Contract("fp8_paged_mqa_logits_torch_sm120", _FALLBACK),
    ),
}
# What is replaced for DYNCHUNK_INDEXER=keys, where it is called; functions of `scoring` are imported by value.
KEY_BLOCKS = {
    FULL_TOPK: (DEEP_GEMM_PREFILL, DENSE_TOPK),
    DENSE_BLOCKS: (PUBLISH_BLOCKS, CONSUME_BLOCKS),
    SPARSE_TABLE: (PUBLISH_TABLE, BUILD_TABLE),
}
# What is hooked there besides limits, for the journal.
INDEXER_HOOKS = {
    "score_tiles": SPARSE_TABLE,
    "indexer_keys": FULL_TOPK,
    "kv_workspace": SPARSE_PREFILL,
    "torch_fallback": V4_INDEXER,
}

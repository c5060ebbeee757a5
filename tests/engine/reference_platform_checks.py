"""The CPU reference platform: the numbers of its attention, what it costs in memory, and when it stays away.

Runs in an environment that has SGLang, on any machine; no server is started here. test_in_one_process.py runs this.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import ROOT, clean_environ, run_python
from tests.engine import warm

PROFILE = ROOT / "docker-images" / "cpu-reference"
PLUGIN = PROFILE / "plugin"
sys.path.insert(0, str(PLUGIN))

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang warns on import about the GPUs that are not there
    from dynchunk_reference.attention import ReferenceAttentionBackend, causal_attention
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

pytestmark = pytest.mark.engine

POOL_TOKENS = 4096
LONGEST_SEQUENCE_TOKENS = 512
DIM = 16
ROUNDING = {"rtol": 1e-5, "atol": 1e-5}
"""fp32 sums of a few hundred terms in another order."""

HEADS = [(6, 2), (4, 4), (4, 1)]
"""(query heads, key heads): grouped, one to one, all share one."""

# (prefix, new rows) of each sequence
BATCHES = {
    "one whole prompt": [(0, 37)],
    "one row": [(0, 1)],
    "a later chunk": [(200, 64)],
    "ragged": [(0, 5), (0, 130), (0, 1), (0, 64)],
    "prefix hits among new prompts": [(64, 3), (0, 70), (129, 1), (63, 65)],
    "mixed with decodes": [(128, 40), (77, 1), (300, 1)],
}


class Engine:
    """The few things an attention backend sees of the engine, with the engine's own KV pool, scattered."""

    def __init__(self, heads: int, kv_heads: int, *, seed: int = 7) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device = "cpu"
        self.token_to_kv_pool = MHATokenToKVPool(
            POOL_TOKENS,
            page_size=1,
            dtype=torch.float32,
            head_num=kv_heads,
            head_dim=DIM,
            layer_num=1,
            device="cpu",
            enable_memory_saver=False,
        )
        self.req_to_token_pool = SimpleNamespace(
            req_to_token=torch.zeros(16, LONGEST_SEQUENCE_TOKENS, dtype=torch.int32)
        )
        self.layer = SimpleNamespace(
            layer_id=0,
            tp_q_head_num=heads,
            tp_k_head_num=kv_heads,
            qk_head_dim=DIM,
            v_head_dim=DIM,
            scaling=DIM**-0.5,
            sliding_window_size=-1,
            is_cross_attention=False,
            attn_type=AttentionType.DECODER,
            k_scale=None,
            v_scale=None,
        )

    def normal(self, *shape: int) -> torch.Tensor:
        """Seeded standard normal numbers."""
        return torch.randn(*shape, generator=self.generator)

    def batch(self, sequences: list[tuple[int, int]], mode: ForwardMode) -> SimpleNamespace:
        """A forward batch whose prefixes are in the pool already, each sequence in a slot of its own."""
        free = 1 + torch.randperm(POOL_TOKENS - 1, generator=self.generator)
        slots = torch.randperm(16, generator=self.generator)[: len(sequences)]
        out_cache_loc = []
        for slot, (prefix, rows) in zip(slots, sequences, strict=True):
            tokens, free = free[: prefix + rows], free[prefix + rows :]
            self.req_to_token_pool.req_to_token[slot, : prefix + rows] = tokens.int()
            for pool in (self.token_to_kv_pool.k_buffer[0], self.token_to_kv_pool.v_buffer[0]):
                pool[tokens[:prefix]] = self.normal(prefix, *pool.shape[1:])
            out_cache_loc.append(tokens[prefix:])
        return SimpleNamespace(
            forward_mode=mode,
            req_pool_indices=slots,
            seq_lens=torch.tensor([prefix + rows for prefix, rows in sequences]),
            extend_prefix_lens=torch.tensor([prefix for prefix, _ in sequences]),
            extend_seq_lens=torch.tensor([rows for _, rows in sequences]),
            encoder_lens=None,
            out_cache_loc=torch.cat(out_cache_loc),
        )

    def inputs(self, batch: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v of the new tokens of `batch`."""
        rows, layer = len(batch.out_cache_loc), self.layer
        key_shape = (rows, layer.tp_k_head_num, DIM)
        return self.normal(rows, layer.tp_q_head_num * DIM), self.normal(*key_shape), self.normal(*key_shape)

    def run(self, backend_class: type, batch: SimpleNamespace, inputs: tuple) -> torch.Tensor:
        """One layer of one forward, as the engine calls it."""
        backend = backend_class(self)
        backend.init_forward_metadata(batch)
        return backend.forward(*inputs, self.layer, batch)


def plain_sdpa(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int = -1) -> torch.Tensor:
    """The textbook, in float64: query [rows, heads, dim], keys and values [n_keys, kv_heads, dim]."""
    rows, n_keys = query.shape[0], keys.shape[0]
    position = torch.arange(n_keys - rows, n_keys)[:, None]
    key = torch.arange(n_keys)[None, :]
    seen = key <= position
    if window >= 0:
        seen &= key >= position - window
    return torch.nn.functional.scaled_dot_product_attention(
        query.double().transpose(0, 1),
        keys.double().transpose(0, 1),
        values.double().transpose(0, 1),
        attn_mask=seen,
        enable_gqa=True,
    ).transpose(0, 1)


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("sequences", BATCHES.values(), ids=BATCHES.keys())
class TestNumbers:
    """The backend computes what the engine's own CPU backend computes, and what the textbook says."""

    def test_extend_equals_torch_native(self, heads, kv_heads, sequences):
        """Prefill: same output and same KV pool as torch_native, for every mix of prefixes and lengths."""
        engine = Engine(heads, kv_heads)
        batch = engine.batch(sequences, ForwardMode.EXTEND)
        inputs = engine.inputs(batch)
        ours = engine.run(ReferenceAttentionBackend, batch, inputs)
        pool = engine.token_to_kv_pool.k_buffer[0].clone()
        theirs = engine.run(TorchNativeAttnBackend, batch, inputs)
        torch.testing.assert_close(ours, theirs, **ROUNDING)
        torch.testing.assert_close(pool, engine.token_to_kv_pool.k_buffer[0], rtol=0, atol=0)

    def test_decode_equals_torch_native(self, heads, kv_heads, sequences):
        """Decode: one new row a sequence on top of all its tokens, same output as torch_native."""
        engine = Engine(heads, kv_heads)
        batch = engine.batch([(prefix + rows, 1) for prefix, rows in sequences], ForwardMode.DECODE)
        inputs = engine.inputs(batch)
        ours = engine.run(ReferenceAttentionBackend, batch, inputs)
        theirs = engine.run(TorchNativeAttnBackend, batch, inputs)
        torch.testing.assert_close(ours, theirs, **ROUNDING)

    @pytest.mark.parametrize("window", [0, 1, 50, 1000])
    def test_sliding_window_equals_torch_native(self, heads, kv_heads, sequences, window):
        """A layer with a sliding window sees that many earlier tokens, like torch_native."""
        engine = Engine(heads, kv_heads)
        engine.layer.sliding_window_size = window
        batch = engine.batch(sequences, ForwardMode.EXTEND)
        inputs = engine.inputs(batch)
        ours = engine.run(ReferenceAttentionBackend, batch, inputs)
        theirs = engine.run(TorchNativeAttnBackend, batch, inputs)
        torch.testing.assert_close(ours, theirs, **ROUNDING)

    @pytest.mark.parametrize("window", [-1, 20])
    def test_each_sequence_equals_plain_sdpa(self, heads, kv_heads, sequences, window):
        """The formula itself: float64 SDPA with the mask written out."""
        engine = Engine(heads, kv_heads)
        for prefix, rows in sequences:
            query = engine.normal(rows, heads, DIM)
            keys, values = (engine.normal(prefix + rows, kv_heads, DIM) for _ in "kv")
            ours = causal_attention(query, keys, values, scale=DIM**-0.5, window_tokens=window if window >= 0 else None)
            torch.testing.assert_close(ours.double(), plain_sdpa(query, keys, values, window), **ROUNDING)


@settings(deadline=None, max_examples=30)
@given(cuts=st.sets(st.integers(1, 199), max_size=8))
def test_chunking_does_not_change_the_result(cuts):
    """However a prompt is cut into chunks, every token gets the output it has in one piece."""
    engine = Engine(6, 2)
    query = engine.normal(200, 6, DIM)
    keys, values = (engine.normal(200, 2, DIM) for _ in "kv")
    whole = causal_attention(query, keys, values, scale=0.25)
    edges = [0, *sorted(cuts), 200]
    pieces = [
        causal_attention(query[start:end], keys[:end], values[:end], scale=0.25)
        for start, end in itertools.pairwise(edges)
    ]
    torch.testing.assert_close(torch.cat(pieces), whole, **ROUNDING)


def test_what_it_cannot_do_is_refused():
    """Cross-attention and encoders raise instead of being computed as causal self-attention."""
    for change in ({"is_cross_attention": True}, {"attn_type": AttentionType.ENCODER_ONLY}):
        engine = Engine(4, 2)
        vars(engine.layer).update(change)
        batch = engine.batch([(0, 4)], ForwardMode.EXTEND)
        with pytest.raises(NotImplementedError, match="causal self-attention only"):
            engine.run(ReferenceAttentionBackend, batch, engine.inputs(batch))


MEASURE_MEMORY = """
import json, sys, torch
from dynchunk_reference.attention import causal_attention

def status(field):
    for line in open("/proc/self/status"):
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024

heads, rows, n_keys = 6, 1024, 16384
query, keys, values = torch.randn(rows, heads, 16), torch.randn(n_keys, 2, 16), torch.randn(n_keys, 2, 16)
causal_attention(query[:8], keys[:64], values[:64], scale=1.0)  # thread pools and code pages
for _ in range(2):  # twice: the first free teaches glibc its threshold for mmap
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts again from here
    before = status("VmRSS")
    causal_attention(query, keys, values, scale=1.0)
    result = {"peak": status("VmHWM") - before, "left": status("VmRSS") - before, "scores": 4 * heads * rows * n_keys}
print(json.dumps(result))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_memory_is_one_score_matrix_and_comes_back():
    """The peak of a forward is 4 * heads * rows * keys bytes and a little; afterwards the process holds none of it."""
    # An interpreter of its own: what another one had before would be in its peak.
    memory = json.loads(plugin_python(MEASURE_MEMORY, OMP_NUM_THREADS="1").stdout)
    assert memory["scores"] <= memory["peak"] + 2**20
    assert memory["peak"] <= 1.15 * memory["scores"]
    assert memory["left"] <= 0.05 * memory["scores"]


def plugin_python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process of its own that has the plugin's folder on PYTHONPATH; it must succeed."""
    settings = clean_environ(PYTHONPATH=str(PLUGIN), **environ)
    done = warm.run(["python", "-W", "ignore", "-c", code], env=settings, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


LOAD_PLUGINS = """
import json, sys
from importlib.metadata import entry_points
from sglang.srt.plugins import load_plugins
load_plugins()
load_plugins()
from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.platforms import current_platform
platform_of = {entry.name: entry.load() for entry in entry_points(group="sglang.srt.platforms")}
print(json.dumps({
    "activate": platform_of["dynchunk_reference"](),
    "platform": type(current_platform).__module__,
    "out of tree": current_platform.is_out_of_tree(),
    "choices": ATTENTION_BACKEND_CHOICES.count("dynchunk_reference"),
    "backend": "dynchunk_reference" in ATTENTION_BACKENDS,
    "modules": sorted(name for name in sys.modules if name.startswith("dynchunk")),
}))
"""
CAUTION = "figures taken on it are not GPU figures"


class TestSelection:
    """Having the folder on PYTHONPATH is not asking for it."""

    def test_nothing_happens_when_no_platform_is_named(self):
        """SGLANG_PLATFORM unset: no platform, no backend, no choice, no line in the log, no module but the first."""
        run = plugin_python(LOAD_PLUGINS)
        state = json.loads(run.stdout)
        assert state.pop("platform").startswith("sglang.")
        assert state == {
            "activate": None,
            "out of tree": False,
            "choices": 0,
            "backend": False,
            "modules": ["dynchunk_reference"],
        }
        assert CAUTION not in run.stderr

    def test_nothing_happens_when_another_platform_is_named(self):
        """SGLANG_PLATFORM naming something else: both entry points do nothing, and import nothing of SGLang."""
        run = run_python(
            "import sys, dynchunk_reference\n"
            "assert dynchunk_reference.activate() is None\n"
            "dynchunk_reference.register()\n"
            "assert not [name for name in sys.modules if name.startswith(('sglang', 'torch'))]\n",
            path=(PLUGIN,),
            SGLANG_PLATFORM="somebody_else",
        )
        assert run.returncode == 0
        assert run.stderr == ""

    def test_named_it_is_the_platform_and_offers_its_backend_once(self):
        """SGLANG_PLATFORM=dynchunk_reference: platform, argument choice and backend are there, said once a process."""
        run = plugin_python(LOAD_PLUGINS, SGLANG_PLATFORM="dynchunk_reference")
        state = json.loads(run.stdout)
        del state["modules"]
        assert state == {
            "activate": "dynchunk_reference.platform:ReferencePlatform",
            "platform": "dynchunk_reference.platform",
            "out of tree": True,
            "choices": 1,
            "backend": True,
        }
        assert run.stderr.count(CAUTION) == 1


APPLY_DEFAULTS = """
import json, os
from types import SimpleNamespace
from dynchunk_reference.platform import ReferencePlatform
given = json.loads(os.environ["GIVEN"])
unsaid = {"attention_backend": None, "dtype": "auto", "max_total_tokens": None, "max_running_requests": None}
args = SimpleNamespace(**{"tp_size": 1, "pp_size": 1, **unsaid, **given})
ReferencePlatform().apply_server_args_defaults(args)
names = ("OMP_NUM_THREADS", "SGLANG_CPU_OMP_THREADS_BIND")
print(json.dumps(vars(args) | {name: os.environ.get(name) for name in names}))
"""


class TestDefaults:
    """`--device cpu` is enough to serve."""

    def test_what_is_unsaid_is_filled_in(self):
        """The backend, fp32, and a KV pool and a number of requests that leave the host its memory."""
        args = json.loads(plugin_python(APPLY_DEFAULTS, GIVEN="{}").stdout)
        assert args["attention_backend"] == "dynchunk_reference"
        assert args["dtype"] == "float32"
        assert args["max_total_tokens"] > 0
        assert args["max_running_requests"] > 0

    def test_what_was_said_stays(self):
        """Flags and variables of the user are not overruled."""
        given = {
            "attention_backend": "flex_attention",
            "dtype": "bfloat16",
            "max_total_tokens": 5,
            "max_running_requests": 3,
            "tp_size": 2,
        }
        environ = {"OMP_NUM_THREADS": "7", "SGLANG_CPU_OMP_THREADS_BIND": "4|5"}
        args = json.loads(plugin_python(APPLY_DEFAULTS, GIVEN=json.dumps(given), **environ).stdout)
        assert args.items() >= (given | environ).items()

    def test_ranks_share_the_cores(self):
        """Every rank has cores and as many threads, whatever the number of cores."""
        args = json.loads(plugin_python(APPLY_DEFAULTS, GIVEN='{"tp_size": 2, "pp_size": 2}').stdout)
        shares = args["SGLANG_CPU_OMP_THREADS_BIND"].split("|")
        assert len(shares) == 4
        assert len({len(share.split(",")) for share in shares}) == 1

    def test_arm64_without_cpu_kernels_starts_without_them(self):
        """The operators the engine takes for granted on arm64 exist, and the shared-memory all-reduce is called off."""
        plugin_python(
            "import os, torch\n"
            "from dynchunk_reference.arm64 import stand_in_for_missing_kernels\n"
            "stand_in_for_missing_kernels()\n"
            "stand_in_for_missing_kernels()\n"
            "torch.ops.sgl_kernel.init_cpu_threads_env('0,1')\n"
            "torch.ops.sgl_kernel.initialize(2, 0)\n"
            "assert 'LOCAL_SIZE' not in os.environ\n",
            LOCAL_SIZE="2",
        )


@pytest.fixture(scope="module")
def make_model() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("make_model", PROFILE / "make_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestModel:
    """make_model.py gives every process and every machine the same model."""

    def test_two_folders_hold_the_same_bytes(self, make_model, tmp_path):
        """Weights, tokenizer and configuration are a function of the options."""
        for name in "ab":
            make_model.main([str(tmp_path / name)])
        names = sorted(path.name for path in (tmp_path / "a").iterdir())
        assert "model.safetensors" in names
        for name in names:
            assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name

    def test_a_second_call_writes_nothing_and_other_options_write_again(self, make_model, tmp_path):
        """Idempotent, but never a stale model."""
        weights = tmp_path / "model.safetensors"
        make_model.main([str(tmp_path)])
        written_ns, size_bytes = weights.stat().st_mtime_ns, weights.stat().st_size
        make_model.main([str(tmp_path)])
        assert weights.stat().st_mtime_ns == written_ns
        make_model.main([str(tmp_path), "--layers", "1"])
        assert weights.stat().st_size < size_bytes

    @pytest.mark.parametrize("text", ["Hello, world!", "kubehulu  \n\tdubacavo", "über 日本 🙂", "<|user|>x"])
    def test_any_text_survives_the_tokenizer(self, make_model, text):
        """Encode then decode is the identity: bytes are tokens too."""
        tokenizer = make_model.make_tokenizer(12_000)
        assert tokenizer.get_vocab_size() == 12_000
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text

#!/usr/bin/env python3
"""Write a tiny Llama that the reference platform serves: weights, configuration, tokenizer, chat template.

    python make_model.py OUT_DIR [--heads 6 ...]

The weights come from one seed on the CPU in fp32, so every process and every tensor- or pipeline-parallel
layout loads the same numbers, which the engine's own `--load-format dummy` does not promise. Needs torch,
safetensors and tokenizers, all of which the engine brings. A second call with the same options does nothing.
"""

import argparse
import itertools
import json
import math
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ("<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>")
BYTE_TOKENS = 256
RECIPE_VERSION = 1
"""Raise when the same options would give other files."""

CHAT_TEMPLATE = (
    "<s>{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The shape of the model; what each costs is in the README."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=16, help="even")
    parser.add_argument("--intermediate", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=12_000, help="tokens, at least 1000")
    parser.add_argument("--context", type=int, default=1_048_576, help="longest sequence in tokens")
    parser.add_argument("--seed", type=int, default=20_240_229)
    options = parser.parse_args(arguments)
    if options.heads % options.kv_heads:
        parser.error(f"--heads {options.heads} must be a multiple of --kv-heads {options.kv_heads}")
    if options.vocab < 1_000:
        parser.error("--vocab must be at least 1000")
    return options


def model_config(options: argparse.Namespace) -> dict[str, object]:
    """Hugging Face `config.json`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": options.heads * options.head_dim,  # transformers wants a multiple of the heads
        "intermediate_size": options.intermediate,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.kv_heads,
        "head_dim": options.head_dim,
        "vocab_size": options.vocab,
        "max_position_embeddings": options.context,
        "rope_theta": 10_000_000.0,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def make_weights(options: argparse.Namespace) -> dict[str, Any]:
    """Random weights whose greedy output depends on the whole prompt and never ends by itself.

    The usual small initialisation gives attention that is an average over all keys: a long prompt would
    hardly move the logits. Here the scores have a standard deviation of SHARPNESS, so that each row picks a
    few per cent of the keys, and the attention outweighs the embedding of the last token.
    """
    import torch

    sharpness, attention_gain = 2.5, 4.0
    generator = torch.Generator().manual_seed(options.seed)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32) * std

    hidden, inner = options.heads * options.head_dim, options.intermediate
    kv_dim = options.kv_heads * options.head_dim
    unit = 1 / math.sqrt(hidden)  # keeps a normalised input at standard deviation 1
    weights = {"model.embed_tokens.weight": normal(options.vocab, hidden, std=1.0)}
    for index in range(options.layers):
        layer = f"model.layers.{index}."
        weights |= {
            layer + "input_layernorm.weight": torch.ones(hidden),
            layer + "self_attn.q_proj.weight": normal(hidden, hidden, std=unit * math.sqrt(sharpness)),
            layer + "self_attn.k_proj.weight": normal(kv_dim, hidden, std=unit * math.sqrt(sharpness)),
            layer + "self_attn.v_proj.weight": normal(kv_dim, hidden, std=unit),
            layer + "self_attn.o_proj.weight": normal(hidden, hidden, std=unit * attention_gain),
            layer + "post_attention_layernorm.weight": torch.ones(hidden),
            layer + "mlp.gate_proj.weight": normal(inner, hidden, std=unit),
            layer + "mlp.up_proj.weight": normal(inner, hidden, std=unit),
            layer + "mlp.down_proj.weight": normal(hidden, inner, std=1 / math.sqrt(inner)),
        }
    weights["model.norm.weight"] = torch.ones(hidden)
    weights["lm_head.weight"] = normal(options.vocab, hidden, std=1.0)
    # A logit of 0 is never the largest of thousands: no early end, no stray bytes in the text.
    weights["lm_head.weight"][: len(SPECIAL_TOKENS) + BYTE_TOKENS] = 0
    return weights


def make_tokenizer(vocab_size: int) -> Any:
    """A byte-level BPE that merges letters to syllables and syllables to longer ones, up to `vocab_size` tokens.

    Made by rule and not trained: the same everywhere, no corpus, and any text survives encode and decode.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    syllables = ["".join(pair) for pair in itertools.product("bcdfghjklmnpqrstvwxyz", "aeiou")]
    merges = [(syllable[0], syllable[1]) for syllable in syllables]
    merges += itertools.product(syllables, syllables)
    wanted = vocab_size - len(SPECIAL_TOKENS) - len(alphabet)
    merges += itertools.islice(
        ((first + second, third) for first, second, third in itertools.product(syllables, repeat=3)),
        max(0, wanted - len(merges)),
    )
    tokens = [*SPECIAL_TOKENS, *alphabet, *("".join(merge) for merge in merges[:wanted])]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges[:wanted])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def main(arguments: list[str] | None = None) -> None:
    """Write the folder, the recipe last: it is there only if all the rest is."""
    options = parse_options(arguments)
    recipe = json.dumps(
        {"recipe": RECIPE_VERSION} | {k: v for k, v in vars(options).items() if k != "out_dir"}, indent=1
    )
    recipe_file = options.out_dir / "dynchunk_recipe.json"
    if recipe_file.is_file() and recipe_file.read_text() == recipe:
        return
    from safetensors.torch import save_file

    options.out_dir.mkdir(parents=True, exist_ok=True)
    recipe_file.unlink(missing_ok=True)
    weights_file = options.out_dir / "model.safetensors"
    save_file(make_weights(options), weights_file, metadata={"format": "pt"})
    weights_file.chmod(0o644)  # safetensors makes it 0600, which another user in a container cannot read
    make_tokenizer(options.vocab).save(str(options.out_dir / "tokenizer.json"))
    for name, content in {
        "config.json": model_config(options),
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "model_max_length": options.context,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }.items():
        (options.out_dir / name).write_text(json.dumps(content, indent=1) + "\n")
    recipe_file.write_text(recipe)


if __name__ == "__main__":
    main()

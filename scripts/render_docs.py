"""Write what README.md and .env.example repeat: the settings, an example of the rule, figures of a bench.

`python -m scripts.render_docs` writes both; `--check` only says whether they are up to date (exit code 1 if not).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from dynchunk import effective
from dynchunk.policy.budget import chunk_tokens
from dynchunk.settings import PREFIX, Settings, knob_fields, shown_default
from launcher.environment import Launch

ROOT = Path(__file__).resolve().parent.parent
# What a bench printed last, by its part of the README.
BENCHES = {
    "interleave": ROOT / "logs" / "bench-2026-11-30" / "interleave.md",
    "pipeline": ROOT / "logs" / "bench-2026-11-30" / "pipeline_ttft.md",
}
GROUPS = ((Settings, PREFIX, "DynChunk"), (Launch, "", "The engine (`./dynchunk serve` turns these into its flags)"))
# What the Compose files read beside the settings: name, default, meaning. `./dynchunk` hands it on to the engine.
SURROUNDINGS = (
    ("BASE_IMAGE", "the Dockerfile's", "The SGLang image that Docker builds on. Without Docker no meaning."),
    (
        "MODELS_DIR",
        "an empty volume",
        "A folder with models, /models for the server in Docker: MODEL_PATH=/models/NAME. Without Docker no meaning.",
    ),
    (
        "HF_HOME",
        "a volume; without Docker ~/.cache/huggingface",
        "A folder for the models that are downloaded by their names.",
    ),
    ("GUARD_GIB", "1.5", "memguard and watch: below so much MemAvailable they abort requests."),
    ("HF_TOKEN", "none", "The key for models that need one."),
    (
        "PYTORCH_ALLOC_CONF",
        "torch's",
        "Settings of torch's memory allocator. serve refuses those that are known to do harm.",
    ),
    ("PYTORCH_CUDA_ALLOC_CONF", "torch's", "The older name of the same."),
    ("NCCL_SOCKET_IFNAME", "NCCL decides", "Several hosts: the network card between them."),
    ("GLOO_SOCKET_IFNAME", "Gloo decides", "Several hosts: the same for Gloo."),
)


def ladder() -> str:
    """The chunk by prefix, with the default settings and the engine's default page."""
    limits = effective.resolve(Settings(), engine_page=1, static_tokens=2048, context_tokens=None).limits
    lines = [
        f"| with the default budget of {limits.budget:.1e} | the chunk (engine's size 2048, page {limits.page}) |",
        "| --- | --- |",
        f"| prefix 0 to {limits.budget // limits.chunk_max:,} | {limits.chunk_max:,}, as in the stock engine |",
    ]
    lines += [
        f"| prefix {prefix:,} | {chunk_tokens(limits, prefix):,} |" for prefix in (131_072, 200_000, 400_000, 500_000)
    ]
    return "\n".join(lines)


def settings_tables() -> str:
    """Every setting: DynChunk's, then the launcher's."""
    parts = []
    for cls, prefix, title in GROUPS:
        lines = [f"**{title}**", "", "| name | default | accepts | meaning |", "| --- | --- | --- | --- |"]
        lines += [
            f"| `{prefix}{f.name.upper()}` | {_default(f)} | {f.metadata['kind'].limits} | {f.metadata['meaning']} |"
            for f in knob_fields(cls)
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def bench(name: str) -> str:
    """What a bench printed: its table, and where it comes from."""
    provenance, _, rest = BENCHES[name].read_text(encoding="utf-8").partition("\n")
    return f"{rest.strip()}\n\n({provenance})"


def env_example() -> str:
    """The text of .env.example: every setting, its meaning above it, unset."""
    lines = [
        "# Settings for `docker compose up` and `./dynchunk serve`. Copy to .env and fill in what you need.",
        "# An empty value counts as unset. Made by scripts/render_docs.py from the declarations in the code.",
    ]
    for cls, prefix, title in GROUPS:
        lines += ["", f"# ---- {title.replace('`', '')} ----"]
        for f in knob_fields(cls):
            kind = f.metadata["kind"].limits.replace("`", "").replace("\\|", "|")
            meaning = f.metadata["meaning"].replace("`", "")
            lines += ["", f"# {meaning}", f"# {kind}; default: {shown_default(f)}", f"#{prefix}{f.name.upper()}="]
    lines += ["", "# ---- Docker, and what the engine's libraries read ----"]
    for name, default, meaning in SURROUNDINGS:
        lines += ["", f"# {meaning}", f"# default: {default}", f"#{name}="]
    return "\n".join(lines) + "\n"


def _default(f: Any) -> str:
    shown = shown_default(f)
    return f"`{shown}`" if f.metadata["shown_default"] is None else shown


def _targets() -> dict[Path, str]:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    parts = {"ladder": ladder(), "settings": settings_tables()} | {name: bench(name) for name in BENCHES}
    for name, text in parts.items():
        start, end = f"<!-- {name}: start -->", f"<!-- {name}: end -->"
        head, _, rest = readme.partition(start)
        _, found, tail = rest.partition(end)
        if not found:
            raise SystemExit(f"README.md has no {start} ... {end}")
        readme = f"{head}{start}\n{text}\n{end}{tail}"
    return {ROOT / "README.md": readme, ROOT / ".env.example": env_example()}


def stale() -> list[str]:
    """The files that are not what the declarations say."""
    return [
        path.name for path, text in _targets().items() if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]


def main(argv: list[str]) -> int:
    """Write the files, or with --check report the stale ones."""
    if argv == ["--check"]:
        for name in stale():
            print(f"{name} is out of date; run python -m scripts.render_docs")
        return 1 if stale() else 0
    for path, text in _targets().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Write the settings table of README.md and the whole of .env.example from the declarations in the code.

`python -m scripts.settings_docs` writes both; `--check` only says whether they are up to date (exit code 1 if not).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from dynchunk.settings import PREFIX, Settings, knob_fields, shown_default
from launcher.environment import Launch

ROOT = Path(__file__).resolve().parent.parent
START, END = "<!-- settings: start -->", "<!-- settings: end -->"
GROUPS = ((Settings, PREFIX, "DynChunk"), (Launch, "", "The engine (`./dynchunk serve` turns these into its flags)"))


def readme_table() -> str:
    """The tables between the two markers of README.md."""
    parts = []
    for cls, prefix, title in GROUPS:
        lines = [f"**{title}**", "", "| name | default | accepts | meaning |", "| --- | --- | --- | --- |"]
        lines += [
            f"| `{prefix}{f.name.upper()}` | {_default(f)} | {f.metadata['kind'].limits} | {f.metadata['meaning']} |"
            for f in knob_fields(cls)
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def env_example() -> str:
    """The text of .env.example: every setting, its meaning above it, unset."""
    lines = [
        "# Settings for `docker compose up` and `./dynchunk serve`. Copy to .env and fill in what you need.",
        "# An empty value counts as unset. Made by scripts/settings_docs.py from the declarations in the code.",
    ]
    for cls, prefix, title in GROUPS:
        lines += ["", f"# ---- {title.replace('`', '')} ----"]
        for f in knob_fields(cls):
            kind = f.metadata["kind"].limits.replace("`", "").replace("\\|", "|")
            meaning = f.metadata["meaning"].replace("`", "")
            lines += ["", f"# {meaning}", f"# {kind}; default: {shown_default(f)}", f"#{prefix}{f.name.upper()}="]
    return "\n".join(lines) + "\n"


def _default(f: Any) -> str:
    shown = shown_default(f)
    return f"`{shown}`" if f.metadata["shown_default"] is None else shown


def _targets() -> dict[Path, str]:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    head, _, rest = readme.partition(START)
    _, _, tail = rest.partition(END)
    return {
        ROOT / "README.md": f"{head}{START}\n{readme_table()}\n{END}{tail}",
        ROOT / ".env.example": env_example(),
    }


def stale() -> list[str]:
    """The files that are not what the declarations say."""
    return [
        path.name for path, text in _targets().items() if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]


def main(argv: list[str]) -> int:
    """Write the files, or with --check report the stale ones."""
    if argv == ["--check"]:
        for name in stale():
            print(f"{name} is out of date; run python -m scripts.settings_docs")
        return 1 if stale() else 0
    for path, text in _targets().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

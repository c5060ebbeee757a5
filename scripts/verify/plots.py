"""Draw the plots and the REPORT.md of a memguard folder again, from its data."""

from __future__ import annotations

import sys
from pathlib import Path

from scripts.verify.errors import EXIT_ERROR, MemguardError
from scripts.verify.publish import publish

_USAGE = "usage: python -m scripts.verify.plots FOLDER\n\nDraws the plots and REPORT.md of a memguard folder again."


def main(arguments: list[str]) -> int:
    """-> the exit code."""
    if arguments in (["--help"], ["-h"]):
        print(_USAGE)
        return 0
    if len(arguments) != 1:
        print(_USAGE, file=sys.stderr)
        return EXIT_ERROR
    try:
        published = publish(Path(arguments[0]))
    except MemguardError as error:
        print(f"memguard: {error}", file=sys.stderr)
        return error.exit_code
    for remark in published.remarks:
        print(remark)
    print(f"{arguments[0]}: REPORT.md and {len(published.plot_files)} plots are drawn again")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""DYNCHUNK_MODEL_FILE: a latency model kept between starts, for the engine it was learned on and no other."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from dynchunk import journal
from dynchunk.policy.latency import Model
from dynchunk.values import parsed


@dataclass(frozen=True)
class ModelFile:
    """path: the file. belongs_to: what the model depends on (engine version, model, layout, backend, device)."""

    path: str
    belongs_to: dict[str, str]

    def load(self) -> Model | None:
        """The model, if the file has one for this engine. The journal says why not."""
        try:
            kept = parsed(Path(self.path).read_text(encoding="utf-8"))
            other = kept["belongs_to"]
            differs = [
                f"{name} is {mine!r} here and {other.get(name)!r} there"
                for name, mine in self.belongs_to.items()
                if other.get(name) != mine
            ]
            if differs:
                journal.record("model_file", journal.NOT_IN_USE, f"{self.path} is of another engine: {differs[0]}")
                return None
            model = Model(**{name: int(kept["ticks"][name]) for name in ("a", "b", "c", "gamma")})
        except FileNotFoundError:
            journal.record("model_file", journal.NOT_IN_USE, f"{self.path} is not there yet")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            journal.record("model_file", journal.NOT_IN_USE, f"{self.path} holds no latency model: {error!r}")
        else:
            journal.record("model_file", journal.APPLIED, self.path)
            return model
        return None

    def save(self, model: Model) -> None:
        """Keep a model. A file that cannot be written is said and changes nothing."""
        text = json.dumps({"belongs_to": self.belongs_to, "ticks": asdict(model)}, indent=1)
        half_written = f"{self.path}.{os.getpid()}"
        try:
            Path(half_written).write_text(text + "\n", encoding="utf-8")
            Path(half_written).replace(self.path)
        except OSError as error:
            journal.record("model_file", journal.REFUSED, f"{self.path}: {error.strerror}; learned anew at every start")
        else:
            journal.record("model_file", journal.APPLIED, f"kept in {self.path}")

    def forget(self) -> None:
        """Take away a model of this engine that was dropped, so that the next start does not run by it.

        A file of another engine, or of another kind, is left alone.
        """
        with suppress(OSError, ValueError, KeyError, TypeError):
            if parsed(Path(self.path).read_text(encoding="utf-8"))["belongs_to"] == self.belongs_to:
                Path(self.path).unlink()

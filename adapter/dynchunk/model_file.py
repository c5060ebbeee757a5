"""DYNCHUNK_MODEL_FILE: a latency model kept between starts, for the engine it was learned on and no other."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from errno import EINVAL
from pathlib import Path

from dynchunk import belongs_to, journal
from dynchunk.policy.latency import TICKS_PER_MS, Model
from dynchunk.values import number, parsed

LONGEST_TEXT = 1 << 20  # characters; what the path names may be a model's weights
MOST_TICKS = 10**9 * TICKS_PER_MS  # beyond it, times of long prompts are no numbers any more


@dataclass(frozen=True)
class ModelFile:
    """path: the file. belongs_to: what the model depends on (engine version, model, layout, backend, device)."""

    path: str
    belongs_to: dict[str, str]

    def load(self) -> Model | None:
        """The model, if the file has one for this engine. The journal says why not."""
        try:
            kept = parsed(self._text())
            differs = belongs_to.of_another(self.belongs_to, kept["belongs_to"])
            if differs:
                journal.record("model_file", journal.NOT_IN_USE, f"{self.path} is {differs}")
                return None
            model = Model(**{name: _ticks(kept["ticks"][name]) for name in ("a", "b", "c", "gamma")})
        except FileNotFoundError:
            journal.record("model_file", journal.NOT_IN_USE, f"{self.path} is not there yet")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            journal.record("model_file", journal.NOT_IN_USE, f"{self.path} holds no latency model: {error!r}")
        else:
            journal.record("model_file", journal.APPLIED, self.path)
            return model
        return None

    def save(self, model: Model) -> None:
        """Keep a model in the place of an earlier one. What cannot be written, or is another file, is said and left."""
        if not self._has_room():
            return
        text = json.dumps({"belongs_to": self.belongs_to, "ticks": asdict(model)}, indent=1)
        half_written = f"{self.path}.{os.getpid()}"
        try:
            Path(half_written).write_text(text + "\n", encoding="utf-8")
            Path(half_written).replace(self.path)
        except OSError as error:
            with suppress(OSError):
                Path(half_written).unlink()
            self._refused(str(error.strerror))
        else:
            journal.record("model_file", journal.APPLIED, f"kept in {self.path}")

    def forget(self) -> None:
        """Take away a model of this engine that was dropped, so that the next start does not run by it.

        A file of another engine, or of another kind, is left alone.
        """
        with suppress(OSError, ValueError, KeyError, TypeError):
            if parsed(self._text())["belongs_to"] == self.belongs_to:
                Path(self.path).unlink()

    def _has_room(self) -> bool:
        """Whether there is nothing at the path, or an empty file, or a model. The journal says what else there is."""
        try:
            text = self._text()
        except FileNotFoundError:
            return True
        except OSError as error:
            self._refused(str(error.strerror))
            return False
        if not text.strip() or _is_a_model(text):
            return True
        self._refused("it holds something else than a latency model and is left as it is; name a file of its own")
        return False

    def _text(self) -> str:
        """What the file holds, as far as a model's may go. Raises OSError."""
        path = Path(self.path)
        if path.exists() and not path.is_file():
            raise OSError(EINVAL, "it is no regular file; name a file of its own")
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(LONGEST_TEXT)

    def _refused(self, why: str) -> None:
        detail = f"DYNCHUNK_MODEL_FILE={self.path}: {why}; learned anew at every start"
        journal.record("model_file", journal.REFUSED, detail)


def _is_a_model(text: str) -> bool:
    try:
        kept = parsed(text)
    except ValueError:
        return False
    return isinstance(kept, dict) and {"belongs_to", "ticks"} <= kept.keys()


def _ticks(value: int) -> int:
    number(value, 0, MOST_TICKS)
    return int(value)

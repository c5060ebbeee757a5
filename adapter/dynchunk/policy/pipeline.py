"""How a prompt is cut so that it leaves a pipeline soonest.

P stages of equal cost are a flow line: a chunk enters a stage when it has left the one before and the chunk ahead has
left this one, so the last chunk leaves the last stage after sum(t) + (P - 1) * max(t). For a given largest t the best
cut is the one whose chunks all take that long, as far as memory allows; which t is best is a search in one dimension.
Many small chunks pay c + gamma*L again and again; a few large ones leave the other stages idle at both ends.

Exact integers: every rank makes the same choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from dynchunk.policy import latency
from dynchunk.policy.cutting import Band, Choice, Rules, bands, by_memory_alone
from dynchunk.policy.latency import Model

# Prompts are told apart to so many parts of what remains of them, so that similar ones share a decision.
LENGTH_PARTS = 128
DECISIONS_KEPT = 1024
HALVINGS = 7
FEW_CHUNKS = 32


class Cost(NamedTuple):
    """A cut prompt in one stage: all chunks and the longest one in ticks, and how many there are."""

    total: int
    longest: int
    chunks: int


def cost(model: Model, cut: Iterable[Band]) -> Cost:
    """What the chunks take, by closed forms for each band."""
    total = longest = chunks = 0
    for prefix, tokens, count in cut:
        prefixes = count * prefix + tokens * (count * (count - 1) // 2)
        each = model.c + (model.b + model.a * tokens) * tokens
        total += count * each + (model.gamma + 2 * model.a * tokens) * prefixes
        longest = max(longest, latency.predict(model, prefix + (count - 1) * tokens, tokens))
        chunks += count
    return Cost(total, longest, chunks)


def makespan(cut: Cost, stages: int) -> int:
    """From the first chunk's entry into the first stage to the last one's exit from the last. Ticks."""
    return cut.total + (stages - 1) * cut.longest


@lru_cache(maxsize=DECISIONS_KEPT)
def _decided(rules: Rules, stages: int, prefix: int, total: int) -> Choice:
    return best(rules, stages, prefix, total)


def choose(rules: Rules, stages: int, prefix: int, total: int) -> Choice:
    """`best` for a prompt that is up to a hundredth longer: decided once for prompts that are nearly alike."""
    if stages == 1:
        return by_memory_alone(rules.allowed.most)
    step = max((total - prefix) // LENGTH_PARTS, 1)
    step = 1 << (step.bit_length() - 1)
    return _decided(rules, stages, prefix // step * step, -(-total // step) * step)


def best(rules: Rules, stages: int, prefix: int, total: int) -> Choice:
    """The cut with the least makespan of a prompt of `total` tokens, of which `prefix` are computed.

    Among ceilings on a chunk's time, and fixed sizes, which win where memory decides most of the cut. In one stage
    there is nothing to keep even: the largest chunks that memory allows.
    """
    allowed = rules.allowed
    unlimited = by_memory_alone(allowed.most)
    if stages == 1 or total <= prefix:
        return unlimited
    costs = _Costs(rules, prefix, total)
    # No ceiling below this makes the longest chunk shorter: the last one has at least so much to do. In a prompt of few
    # chunks what is left for the last one depends on all before, so lower ones are tried as well.
    last = prefix if total - prefix <= FEW_CHUNKS * allowed.most else max(prefix, total - allowed.least)
    lowest = latency.predict(rules.model, last, min(allowed.least, total - prefix))
    families: list[tuple[Callable[[int], Choice], list[int]]] = [
        (by_memory_alone, _falling(allowed.most, allowed.least, Fraction(1, 2))),
        (lambda ticks: Choice(allowed.most, ticks), _falling(costs[unlimited].longest, lowest, Fraction(9, 10))),
    ]

    def order(choice: Choice) -> tuple[int, int]:
        return makespan(costs[choice], stages), costs[choice].chunks

    ranked = sorted((make(value) for make, values in families for value in values), key=order)
    # The makespan is jagged: under one ceiling the last chunk is full, under the next there is one more for the rest.
    # For a number of chunks, the lowest ceiling that needs no more is the best. So: the two numbers that did best so
    # far and their neighbours, each with its lowest ceiling and its smallest size.
    numbers = list(dict.fromkeys(costs[choice].chunks for choice in ranked))[:2]
    for number in sorted({number + by for number in numbers for by in (-1, 0, 1)}):
        for make, values in families:
            costs.approach(number, make, values)
    return min(costs, key=order)


class _Costs(dict[Choice, Cost]):
    """What each way to cut one prompt costs, worked out when it is first asked for."""

    def __init__(self, rules: Rules, prefix: int, total: int) -> None:
        self._rules, self._prefix, self._total = rules, prefix, total

    def __missing__(self, choice: Choice) -> Cost:
        self[choice] = found = cost(self._rules.model, bands(self._rules, choice, self._prefix, self._total))
        return found

    def approach(self, number: int, make: Callable[[int], Choice], values: list[int]) -> None:
        """Work out values ever nearer to the lowest that needs at most `number` chunks. `values` fall."""
        passing = sum(self[make(value)].chunks <= number for value in values)
        if not 0 < passing < len(values):
            return
        high, low = values[passing - 1], values[passing]
        for _ in range(HALVINGS):
            middle = (low + high) // 2
            if self[make(middle)].chunks <= number:
                high = middle
            else:
                low = middle


def _falling(first: int, last: int, ratio: Fraction) -> list[int]:
    """A geometric series of integers from `first` down to `last`, which is its end."""
    values = [first]
    while values[-1] > last:
        values.append(max(min(int(values[-1] * ratio), values[-1] - 1), last))
    return values

"""Check every target of a patch before the first one is changed; then change all of them, or none.

A target is a function of the engine, named with its owner inside one module. Its contract is the exact list of
parameters (annotations left out, they are not behaviour) and the names its body must use, which is how a hook knows
that the function still asks the sizer, still reads the attribute. The same contracts are checked against live objects
at import and against source text (`read_source`) in the image build and in tests, where torch is not imported.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

MARK = "__dynchunk__"


class ContractError(RuntimeError):
    """The engine is not what a patch was written for. The message names target, expected and found."""


@dataclass(frozen=True)
class Contract:
    """What must be true of one function. `signatures`: the parameter lists that are understood, as text."""

    target: str
    signatures: tuple[str, ...]
    uses: tuple[str, ...] = ()

    def problem(self, seen: Seen | None) -> str | None:
        """What is wrong with the target as seen, or None."""
        if seen is None:
            return f"{self.target}: expected ({self.signatures[0]}), found nothing of that name"
        if seen.wrapped:
            return f"{self.target}: expected the engine's own function, found one that other code has wrapped"
        if seen.signature not in self.signatures:
            expected = " or ".join(f"({s})" for s in self.signatures)
            return f"{self.target}: expected {expected}, found ({seen.signature})"
        missing = [name for name in self.uses if name not in seen.names]
        if missing:
            return f"{self.target}: expected a body that uses {', '.join(missing)}, found none"
        return None


@dataclass(frozen=True)
class Seen:
    """A function as found, in a live module or in source text."""

    signature: str
    names: frozenset[str]
    wrapped: bool = False


@dataclass(frozen=True)
class Patch:
    """A contract and what replaces its target: `replace(original)` returns the new function.

    Without `replace` the target is only checked: another hook relies on it.
    """

    contract: Contract
    replace: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None


def apply_all(module: ModuleType, patches: Iterable[Patch], *, change: bool = True, hint: str = "") -> None:
    """Patch `module`, or raise ContractError naming every target that does not match and change nothing.

    hint: what the message ends with. With `change=False` only the check is made (mode `report`). A module that carries
    the same patches already is left alone: both loaders may start DynChunk.
    """
    planned = []
    problems = []
    for patch in patches:
        owner, name, function = _resolve(module, patch.contract.target)
        if getattr(function, MARK, False):
            continue
        problem = patch.contract.problem(None if function is None else _see(function))
        if problem:
            problems.append(problem)
        elif patch.replace is not None:
            planned.append((owner, name, patch.replace, function))
    if problems:
        raise ContractError(f"{module.__name__}: " + "; ".join(problems) + (f"; {hint}" if hint else ""))
    if not change:
        return
    for owner, name, replace, function in planned:
        replacement = functools.wraps(function)(replace(function))
        setattr(replacement, MARK, True)
        setattr(owner, name, replacement)


def _resolve(module: ModuleType, target: str) -> tuple[Any, str, Any]:
    """(owner, attribute name, function or None) for a dotted target such as `Scheduler.on_idle`."""
    *path, name = target.split(".")
    owner: Any = module
    for part in path:
        owner = getattr(owner, part, None)
    # vars(), not getattr: a method inherited from elsewhere is not this module's to change.
    return owner, name, None if owner is None else vars(owner).get(name)


def _see(function: Any) -> Seen:
    plain = inspect.unwrap(function) if _engine_decorated(function) else function
    signature = inspect.signature(plain)
    bare = signature.replace(
        parameters=[p.replace(annotation=p.empty) for p in signature.parameters.values()],
        return_annotation=signature.empty,
    )
    return Seen(
        str(bare)[1:-1],
        _code_names(plain.__code__),
        wrapped=hasattr(function, "__wrapped__") and not _engine_decorated(function),
    )


def _engine_decorated(function: Any) -> bool:
    """Whether the outermost wrapper was written in SGLang itself, by a decorator in the source we read."""
    module = str(getattr(function, "__globals__", {}).get("__name__", ""))
    return (
        hasattr(function, "__wrapped__")
        and module.startswith("sglang.srt.")
        # Where SGLang's plugin hooks are made: those are other people's wrappers.
        and not module.startswith("sglang.srt.plugins")
    )


def _code_names(code: CodeType) -> frozenset[str]:
    names = set(code.co_names) | set(code.co_varnames) | set(code.co_freevars)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            names |= _code_names(const)
    return frozenset(names)


def read_source(text: str) -> dict[str, Seen]:
    """Every function of a module's source text by dotted name, seen as `apply_all` would see it."""
    found: dict[str, Seen] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
                names |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
                found[prefix + node.name] = Seen(_bare(node.args), frozenset(names))

    visit(ast.parse(text).body, "")
    return found


def _bare(args: ast.arguments) -> str:
    for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]:
        if arg is not None:
            arg.annotation = None
    # ast.unparse writes `a=1`, as str(inspect.signature) does for parameters without annotation.
    return ast.unparse(args)

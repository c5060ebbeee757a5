"""A stand-in for the public SGLang image, made from this machine's own files; no registry and no network.

`python stand_in.py OUT.tar` writes a root file system for `docker import`: Debian's files by dpkg's lists, the Python
that this virtual environment was made from, and as much of the environment as the image build looks at (the engine's
source text and what the launcher imports). To run the engine, mount the whole environment over it, at the same path.

It has what makes the mechanics of the overlay real. It says nothing about the real image's Python, paths or CUDA.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

# What a shell and the engine call (`lscpu`, `ps`), and libraries that wheels expect of the system.
DEBIAN_PACKAGES = (
    *("base-files", "base-passwd", "bash", "dash", "coreutils", "findutils", "grep", "hostname", "libc-bin"),
    *("procps", "sed", "util-linux"),
    *("libgcc-s1", "libgomp1", "libnuma1", "libstdc++6"),
)
SYSTEM_FILES = ("/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/ld.so.cache")
TOOL_PACKAGES = ("httpx", "psutil", "rich", "typer")
NOT_NEEDED = re.compile(r"/usr/share/(doc|info|locale|lintian|man|zoneinfo)/|/usr/lib/[^/]+/(gconv|perl)/")
NOT_IN_PYTHON = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip", "turtledemo"}

VENV = Path(sys.prefix)
BASE = Path(sys.base_prefix)
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"


class StandInError(Exception):
    """This machine does not have what a stand-in is made of."""


def why_not() -> str | None:
    """Why no stand-in can be made here, or None."""
    if sys.prefix == sys.base_prefix:
        return "the tests do not run in a virtual environment"
    try:
        metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return f"SGLang is not installed in {sys.prefix}"
    if not Path("/var/lib/dpkg/status").is_file():
        return "not a Debian system: there are no dpkg lists to make a base image from"
    return None


def debian_files() -> Iterator[Path]:
    """The files of DEBIAN_PACKAGES and of all they depend on, documentation left out."""
    listed = _run("dpkg-query", "-W", "-f", "${Package}\t${Pre-Depends}, ${Depends}\t${Provides}\n")
    depends: dict[str, list[str]] = {}
    for line in listed.splitlines():
        name, wanted, provides = line.split("\t")
        # The first of alternatives that is installed is found below; versions do not matter, all are installed.
        depends[name] = [re.split(r"[ (:]", one.strip())[0] for one in re.split(r"[,|]", wanted) if one.strip()]
        for virtual in filter(None, (one.strip().split(" ")[0] for one in provides.split(","))):
            depends.setdefault(virtual, [name])
    packages: set[str] = set()
    todo = [name for name in DEBIAN_PACKAGES if name in depends]
    while todo:
        name = todo.pop()
        if name not in packages and name in depends and not name.startswith(("debconf", "perl")):
            packages.add(name)
            todo += depends[name]
    for line in _run("dpkg-query", "-L", *sorted(packages), check=False).splitlines():
        if line.startswith("/") and not NOT_NEEDED.search(line + "/"):
            yield Path(line)


def python_files() -> Iterator[Path]:
    """The base Python: interpreter, standard library, and the system libraries that these are linked with."""
    yield from (BASE / "bin").glob("python3*")
    yield from (BASE / "lib").glob("libpython*.so*")
    library = BASE / "lib" / PYTHON
    yield from _tree(library, skip=NOT_IN_PYTHON)
    binaries = [*library.glob("lib-dynload/*.so"), (VENV / "bin" / "python3").resolve()]
    for linked in re.findall(r"=> (/\S+)", _run("ldd", *map(str, binaries), check=False)):
        yield Path(linked)


def environment_files() -> Iterator[Path]:
    """The part of the virtual environment that the image build looks at."""
    yield VENV / "pyvenv.cfg"
    yield from (VENV / "bin").glob("python*")
    site = Path(sysconfig.get_paths()["purelib"])
    yield from _tree(site / "sglang", only=".py")
    yield from _tree(site / f"sglang-{metadata.version('sglang')}.dist-info")
    for distribution in _closure(TOOL_PACKAGES):
        for file in distribution.files or ():
            path = Path(str(distribution.locate_file(file)))
            # Console scripts lie outside site-packages; nobody calls them here.
            if path.is_file() and site in path.parents and "__pycache__" not in path.parts:
                yield path


def write(out: Path) -> None:
    """Write the tar. Raises StandInError where the machine does not have what it takes."""
    reason = why_not()
    if reason:
        raise StandInError(reason)
    written: set[str] = set()
    with tarfile.open(out, "w") as tar:
        for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
            if Path("/", name).is_symlink():
                _add(tar, Path("/", name), written)
        folders = {"tmp": 0o1777, "dev": 0o755, "proc": 0o555, "sys": 0o555, "usr": 0o755, "usr/local": 0o755}
        for name, mode in (folders | {"usr/local/bin": 0o755}).items():
            _folder(tar, name, written, mode)
        for path in (*map(Path, SYSTEM_FILES), *debian_files(), *python_files(), *environment_files()):
            _add_with_targets(tar, path, written)


def _add_with_targets(tar: tarfile.TarFile, path: Path, written: set[str]) -> None:
    """Add a path and, where it is a link, what it points to, link by link."""
    for _ in range(10):
        # With a merged /usr the lists still say /bin/bash; a file's folder must be the real one.
        path = path.parent.resolve() / path.name
        if not (path.is_symlink() or path.is_file()):
            return
        _add(tar, path, written)
        if not path.is_symlink():
            return
        path = path.parent / path.readlink()


def _add(tar: tarfile.TarFile, path: Path, written: set[str]) -> None:
    name = str(path).lstrip("/")
    if name in written:
        return
    # World-readable folders, also where this machine's are not (/root): the image runs tools as other users, too.
    for parent in reversed(Path(name).parents):
        if str(parent) != ".":
            _folder(tar, str(parent), written)
    written.add(name)
    tar.add(path, arcname=name, recursive=False, filter=_root_owned)


def _folder(tar: tarfile.TarFile, name: str, written: set[str], mode: int = 0o755) -> None:
    if name in written:
        return
    written.add(name)
    info = tarfile.TarInfo(name)
    info.type, info.mode = tarfile.DIRTYPE, mode
    tar.addfile(info)


def _root_owned(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = "root"
    return info


def _tree(folder: Path, *, skip: Iterable[str] = (), only: str = "") -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            if path.name not in skip and not (only and path.name == "__pycache__"):
                yield from _tree(path, skip=skip, only=only)
        elif path.name.endswith(only) and path.suffix != ".a":
            yield path


def _closure(names: Iterable[str]) -> list[metadata.Distribution]:
    """The named distributions and all that they require here."""
    found: dict[str, metadata.Distribution] = {}
    todo = list(names)
    while todo:
        key = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if key in found:
            continue
        try:
            found[key] = metadata.distribution(key)
        except metadata.PackageNotFoundError as error:
            raise StandInError(f"{key} is not installed in {sys.prefix}") from error
        for text in found[key].requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(requirement.name)
    return list(found.values())


def _run(*command: str, check: bool = True) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=check).stdout


if __name__ == "__main__":
    write(Path(sys.argv[1]))

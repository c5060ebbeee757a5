"""The Dockerfile and the Compose files as text: linted, accepted by Compose, and complete. Needs no engine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dynchunk import __version__
from dynchunk.settings import PREFIX, Settings, env_name, knob_fields
from launcher import allocator, health
from launcher.environment import Launch
from tests.image import harness

DOCKERFILE = harness.ROOT / "Dockerfile"
NODE = {"NNODES": "2", "NODE_RANK": "1", "DIST_INIT_ADDR": "192.0.2.1:5000"}
KNOBS = [env_name(f, PREFIX) for f in knob_fields(Settings)] + [env_name(f, "") for f in knob_fields(Launch)]
# What a service decides itself, whatever the operator sets: where it listens inside the container, and the tiny model.
OWN = {
    "server": {"HOST"},
    "cpu": {"HOST", "MODEL_PATH", "SERVED_MODEL_NAME", "TP_SIZE", "PP_SIZE", "NNODES", "NODE_RANK", "EXTRA_ARGS"},
}
# What it sets only where the operator does not.
DEFAULTED = {"server": set(), "cpu": {"DYNCHUNK_TRACE"}}


def test_the_dockerfile_is_clean(programs: Path) -> None:
    """Hadolint has nothing to say, not even a hint."""
    done = harness.run(
        str(programs / "hadolint"), "--no-color", str(DOCKERFILE), environ=harness.clean_environ(), check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_dockerfile_pins_the_base_and_fetches_nothing() -> None:
    """The base is a tag of the tested engine, and no line needs the network or a newer builder."""
    text = DOCKERFILE.read_text(encoding="utf-8")
    assert "ARG BASE_IMAGE=lmsysorg/sglang:v0.5.23\nFROM ${BASE_IMAGE}\n" in text
    code = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for word in ("pip", "apt", "curl", "wget", "git ", "ADD", "--mount", "--chmod", "<<", "ENTRYPOINT", "USER"):
        assert not re.search(rf"(^|\s){re.escape(word)}", code), word
    assert not text.startswith("# syntax")


def test_the_label_says_the_version() -> None:
    """The image's label is the version of the adapter in it."""
    assert f'org.opencontainers.image.version="{__version__}"' in DOCKERFILE.read_text(encoding="utf-8")


def test_docker_waits_longer_than_the_probe() -> None:
    """Docker kills no probe that is still waiting for the engine: its message would be lost."""
    timeout = re.search(r"--timeout=(\d+)s", DOCKERFILE.read_text(encoding="utf-8"))
    assert timeout is not None
    assert int(timeout[1]) > health.TIMEOUT_S


@pytest.mark.parametrize("chosen", [("compose.yaml",), ("compose.yaml", "compose.node.yaml")], ids=["one", "node"])
@pytest.mark.parametrize("with_env", [False, True], ids=["no-env", "env"])
def test_compose_takes_the_files(project: harness.Project, chosen: tuple[str, ...], with_env: bool) -> None:
    """Every Compose file is valid with an .env and without, and says nothing about it."""
    env = project.folder / ".env"
    if with_env:
        env.write_text("".join(f"{name}=\n" for name in KNOBS) + "DYNCHUNK_BUDGET=1e8\n")
    try:
        extra = NODE if len(chosen) > 1 else {}
        done = project.compose("--profile", "*", "config", "--quiet", files=chosen, environ=extra)
    finally:
        env.unlink(missing_ok=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("service", ["server", "cpu"])
def test_every_knob_reaches_the_container(project: harness.Project, service: str) -> None:
    """What the operator sets is in the container, for every setting there is; what is unset stays unset."""
    given = {name: f"given-{number}" for number, name in enumerate(KNOBS)} | {"HOST": "127.0.0.1", "PORT": "30000"}
    seen = project.config(given)["services"][service]["environment"]
    assert {name for name in KNOBS if seen.get(name) != given[name]} == OWN[service]
    unset = project.config()["services"][service]["environment"]
    assert {name for name in KNOBS if unset.get(name) is not None} == OWN[service] | DEFAULTED[service]


def test_the_cpu_service_is_the_reference_platform(project: harness.Project) -> None:
    """What the platform's own env file says is what Compose sets, and the operator cannot overrule it by accident."""
    lines = (harness.ROOT / "docker-images" / "cpu-reference" / "env").read_text(encoding="utf-8").splitlines()
    wanted = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert wanted
    seen = project.config(dict.fromkeys(wanted, "for the GPU"))["services"]["cpu"]["environment"]
    assert seen.pop("EXTRA_ARGS").split() == [*wanted.pop("EXTRA_ARGS").split(), "--enable-metrics"]
    assert {name: seen[name] for name in wanted} == wanted


def test_the_allocators_settings_reach_the_container(project: harness.Project) -> None:
    """`serve` can only warn of allocator settings that it sees."""
    seen = project.config(dict.fromkeys(allocator.VARIABLES, "expandable_segments:True"))
    for name in allocator.VARIABLES:
        assert seen["services"]["server"]["environment"][name] == "expandable_segments:True"


def test_the_env_file_reaches_the_container_as_it_is(project: harness.Project) -> None:
    """A misspelt setting in .env gets to the launcher, which refuses it; the shell overrules .env."""
    env = project.folder / ".env"
    env.write_text("DYNCHUNK_BUGDET=1e8\nDYNCHUNK_BUDGET=1e8\nNCCL_DEBUG=INFO\nHF_HOME=/data/hf\n")
    try:
        server = project.config({"DYNCHUNK_BUDGET": "3e8"})["services"]["server"]
    finally:
        env.unlink()
    environment = server["environment"]
    assert (environment["DYNCHUNK_BUGDET"], environment["NCCL_DEBUG"]) == ("1e8", "INFO")
    assert environment["DYNCHUNK_BUDGET"] == "3e8"
    assert environment["HF_HOME"] == "/huggingface"
    assert {"type": "bind", "source": "/data/hf", "target": "/huggingface", "bind": {}} in server["volumes"]


def test_host_and_port_are_where_the_machine_publishes(project: harness.Project) -> None:
    """The server is on this machine only unless HOST says otherwise, and on the launcher's own port."""
    defaults = {f.name: f.default for f in knob_fields(Launch)}
    for service in ("server", "cpu"):
        (port,) = project.config()["services"][service]["ports"]
        assert (port["host_ip"], port["published"]) == (defaults["host"], str(defaults["port"]))
        assert port["target"] == defaults["port"]
        (port,) = project.config({"HOST": "192.0.2.7", "PORT": "8000"})["services"][service]["ports"]
        assert (port["host_ip"], port["published"], port["target"]) == ("192.0.2.7", "8000", 8000)


def test_the_base_has_one_default(project: harness.Project) -> None:
    """Unset, BASE_IMAGE is the Dockerfile's; set, it is what Compose builds on."""
    assert not project.config()["services"]["server"]["build"].get("args", {}).get("BASE_IMAGE")
    built = project.config({"BASE_IMAGE": "mirror/sglang:v0.5.23"})["services"]["server"]["build"]
    assert built["args"]["BASE_IMAGE"] == "mirror/sglang:v0.5.23"


def test_up_starts_the_server_only(project: harness.Project) -> None:
    """`docker compose up` is the GPU server; the CPU's and memguard start when named."""
    services = project.compose("config", "--services").stdout.split()
    assert services == ["server"]


def test_what_a_server_needs_is_there(project: harness.Project) -> None:
    """An init for zombies, shared memory, the GPU, time to stop; and no memory limit that would protect nothing."""
    services = project.config()["services"]
    # One that lives among the host's processes has none to reap.
    assert all(service["init"] or service.get("pid") == "host" for service in services.values())
    server = services["server"]
    assert server["ipc"] == "host"
    (device,) = server["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert server["stop_grace_period"] == "3m0s"
    for service in services.values():
        assert "mem_limit" not in service
        assert "limits" not in service.get("deploy", {}).get("resources", {})


def test_a_node_uses_the_hosts_network(project: harness.Project) -> None:
    """One of several hosts publishes nothing, listens where HOST says, and must be told which host it is."""
    files = ("compose.yaml", "compose.node.yaml")
    services = project.config(NODE, files)["services"]
    server = services["server"]
    assert server["network_mode"] == "host"
    assert not server.get("ports")
    assert {name: server["environment"][name] for name in NODE} == NODE
    assert server["environment"]["HOST"] == ""
    assert services["memguard"]["network_mode"] == "host"
    for name in NODE:
        done = project.compose("config", "--quiet", files=files, check=False, environ={**NODE, name: ""})
        assert done.returncode != 0
        assert f"required variable {name} is missing a value: say " in done.stderr

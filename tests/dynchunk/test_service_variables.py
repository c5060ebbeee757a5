"""What Kubernetes puts into the environment for a Service named after us is no misspelt setting."""

from __future__ import annotations

import pytest

from dynchunk.settings import Settings, SettingsError, from_env

# As the kubelet makes them for a Service `dynchunk` with a port and with named ports, and for `dynchunk-head`.
SERVICE = {
    "DYNCHUNK_SERVICE_HOST": "10.96.12.7",
    "DYNCHUNK_SERVICE_PORT": "8000",
    "DYNCHUNK_SERVICE_PORT_HTTP": "8000",
    "DYNCHUNK_SERVICE_PORT_HTTP_2": "8001",
    "DYNCHUNK_PORT": "tcp://10.96.12.7:8000",
    "DYNCHUNK_PORT_8000_TCP": "tcp://10.96.12.7:8000",
    "DYNCHUNK_PORT_8000_TCP_PROTO": "tcp",
    "DYNCHUNK_PORT_8000_TCP_PORT": "8000",
    "DYNCHUNK_PORT_8000_TCP_ADDR": "10.96.12.7",
    "DYNCHUNK_PORT_53_UDP": "udp://[fd00::7]:53",
    "DYNCHUNK_PORT_53_UDP_ADDR": "fd00::7",
    "DYNCHUNK_HEAD_SERVICE_HOST": "10.96.12.8",
    "DYNCHUNK_HEAD_SERVICE_PORT": "5000",
    "DYNCHUNK_HEAD_PORT": "tcp://10.96.12.8:5000",
    "DYNCHUNK_HEAD_PORT_5000_TCP_ADDR": "10.96.12.8",
}


def test_a_services_variables_are_no_settings() -> None:
    """Refusing them would refuse every container of a namespace with such a Service."""
    assert from_env(SERVICE) == Settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DYNCHUNK_PORT", "30000"),  # meant for PORT
        ("DYNCHUNK_PORT", ""),
        ("DYNCHUNK_SERVICE_HOST", "my host"),
        ("DYNCHUNK_SERVICE_PORT", "http"),
        ("DYNCHUNK_PORT_8000", "tcp://10.0.0.1:8000"),
        ("DYNCHUNK_PORT_8000_TCP", "8000"),
        ("DYNCHUNK_PORT_8000_TCP_PROTO", "yes"),
        ("DYNCHUNK_BUGDET", "tcp://10.0.0.1:8000"),
        ("DYNCHUNK_PORTS", "tcp://10.0.0.1:8000"),
    ],
)
def test_nothing_else_is_let_pass(name: str, value: str) -> None:
    """Name and value both have to be of that shape; a mistake of the operator's is still refused."""
    with pytest.raises(SettingsError, match=f"{name}: unknown setting"):
        from_env({name: value})


def test_a_default_does_not_contradict_a_choice() -> None:
    """The largest chunk alone may be below the default floor; two that were chosen may not cross."""
    assert from_env({"DYNCHUNK_CHUNK_MAX": "200"}).chunk_max == 200
    with pytest.raises(SettingsError, match="DYNCHUNK_CHUNK_MIN=256 is above DYNCHUNK_CHUNK_MAX=200"):
        from_env({"DYNCHUNK_CHUNK_MAX": "200", "DYNCHUNK_CHUNK_MIN": "256"})

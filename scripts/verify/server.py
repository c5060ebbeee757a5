"""The engine's HTTP endpoints that memguard and compare need, and what each of their failures means."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import httpx

from dynchunk.values import parsed
from scripts.verify.errors import MemguardError, RefusedError, ServerGoneError, ServerTimeoutError, WrongKeyError
from scripts.verify.redact import without_password

CONNECT_S = 5.0
ANSWER_S = 30.0
ABORT_ANSWER_S = 2.0
FLUSH_WAIT_S = 30  # how long the engine itself waits until it is idle
HEALTH_ANSWER_S = 30.0  # the engine gives its own check 20 s


class Server:
    """A running SGLang server. Every call may come from any thread.

    option, program: what messages name as the cure, and as the one that asks.
    """

    def __init__(self, url: str, api_key: str | None, *, option: str = "--url", program: str = "memguard") -> None:
        self.url = url.rstrip("/")
        self.shown = without_password(self.url)
        self._option = option
        self._program = program
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # Proxies of the environment are for the outside; they would swallow a loopback address.
        self._client = httpx.Client(
            headers=headers, timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S), trust_env=False
        )

    def close(self) -> None:
        """Close the connections; the engine then gives up what was still running for them."""
        self._client.close()

    def info(self) -> dict[str, Any]:
        """What the engine says about itself."""
        try:
            answer = self._call("GET", "/server_info").json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise MemguardError(f"{self.shown}/server_info did not answer as SGLang does; is this another server?")
        return answer

    def context_tokens(self) -> int | None:
        """The longest sequence the model takes, as the OpenAI endpoint says it; None where it does not."""
        try:
            models = self._call("GET", "/v1/models").json()["data"]
            return int(models[0]["max_model_len"])
        except (MemguardError, ValueError, KeyError, IndexError, TypeError):
            return None

    def flush_cache(self) -> None:
        """Empty the prefix cache. The engine waits until it is idle; one that stays busy is an error."""
        try:
            self._call("POST", f"/flush_cache?timeout={FLUSH_WAIT_S}", answer_s=FLUSH_WAIT_S + ANSWER_S)
        except RefusedError:
            raise MemguardError(
                f"the server at {self.shown} is busy with other requests; {self._program} needs it to itself"
            ) from None

    def generate(self, body: bytes, timeout_s: float) -> dict[str, Any]:
        """Run one request to its end. body: the JSON of /generate."""
        try:
            answer = self._call("POST", "/generate", body=body, answer_s=timeout_s).json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise MemguardError(f"{self.shown}/generate did not answer with a JSON object")
        return answer

    def stream(self, body: bytes, timeout_s: float) -> Iterator[dict[str, Any]]:
        """Run one request to its end. -> the events of its answer as they come. body: the JSON of /generate.

        timeout_s: the longest silence. Raises RefusedError also where the engine refuses after the stream has begun.
        """
        path, headers = "/generate", {"Content-Type": "application/json"}
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
        with (
            self._explained(path, timeout_s),
            self._client.stream("POST", self.url + path, content=body, headers=headers, timeout=timeout) as response,
        ):
            if response.is_error:
                response.read()
            _raise_for(response, self.shown, path)
            ended = False
            for line in response.iter_lines():  # to the very end: a connection left early cannot serve the next request
                if line == "data: [DONE]":
                    ended = True
                elif line.startswith("data: "):
                    yield self._event(line.removeprefix("data: "))
        if ended:
            return
        raise ServerGoneError(f"the answer of {self.shown} broke off; the server's log says why")

    def abort(self, rid: str) -> None:
        """Ask the engine to end a request; it does so when the chunk in flight is done. An unknown rid is no error."""
        self._call("POST", "/abort_request", json={"rid": rid}, answer_s=ABORT_ANSWER_S)

    def abort_all(self) -> None:
        """Ask the engine to end every request it has."""
        self._call("POST", "/abort_request", json={"rid": "", "abort_all": True}, answer_s=ABORT_ANSWER_S)

    def requests(self) -> int | None:
        """How many requests the engine has, running and waiting; None where it does not say or does not answer."""
        try:
            loads = self._call("GET", "/v1/loads?include=core", answer_s=ABORT_ANSWER_S).json()["loads"]
            return sum(_requests(load) for load in loads)
        except (MemguardError, ValueError, KeyError, TypeError):
            return None

    def healthy(self, answer_s: float = HEALTH_ANSWER_S) -> bool:
        """Whether the engine's own check passes."""
        try:
            self._call("GET", "/health", answer_s=answer_s)
        except MemguardError:
            return False
        return True

    def _call(
        self, method: str, path: str, *, body: bytes | None = None, json: Any = None, answer_s: float = ANSWER_S
    ) -> httpx.Response:
        headers = {"Content-Type": "application/json"} if body is not None else None
        timeout = httpx.Timeout(answer_s, connect=min(CONNECT_S, answer_s))
        with self._explained(path, answer_s):
            response = self._client.request(
                method, self.url + path, content=body, json=json, headers=headers, timeout=timeout
            )
        _raise_for(response, self.shown, path)
        return response

    @contextlib.contextmanager
    def _explained(self, path: str, answer_s: float) -> Iterator[None]:
        """What can go wrong between here and the server, in words."""
        try:
            yield
        except httpx.ConnectError:
            raise ServerGoneError(
                f"no server answers at {self.shown}; start one there or say where it is with {self._option}"
            ) from None
        except httpx.TimeoutException:
            raise ServerTimeoutError(f"{self.shown}{path} did not answer within {answer_s:g} s") from None
        except (httpx.InvalidURL, httpx.UnsupportedProtocol):
            raise MemguardError(f"{self.shown!r} is not an address like http://127.0.0.1:30000") from None
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            raise ServerGoneError(
                f"the connection to {self.shown} broke ({reason}); the server's log says why"
            ) from None

    def _event(self, data: str) -> dict[str, Any]:
        """One event of a stream. The status was sent before the engine looked at the request: refusals come here."""
        try:
            event = parsed(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise MemguardError(f"{self.shown}/generate did not answer as SGLang does; is this another server?")
        error = event.get("error")
        if error is None:
            return event
        message = error.get("message") if isinstance(error, dict) else error
        if isinstance(error, dict) and error.get("code", 400) != 400:
            raise MemguardError(f"{self.shown}/generate ended with {error['code']}: {message}")
        raise RefusedError(f"/generate: {message}")


def _requests(load: dict[str, Any]) -> int:
    """Of one rank. A long prompt between two of its chunks is in neither count; its open tokens tell."""
    waiting = int(load["num_waiting_reqs"])
    between_chunks = not waiting and int(load.get("num_waiting_uncached_tokens") or 0) > 0
    return int(load["num_running_reqs"]) + waiting + between_chunks


def _raise_for(response: httpx.Response, url: str, path: str) -> None:
    path = path.partition("?")[0]
    if response.status_code in (401, 403):
        raise WrongKeyError(
            f"the server at {url} refused the API key for {path}; give the right one in API_KEY or with --api-key "
            "(a server with an admin key wants that one for /flush_cache and /abort_request)"
        )
    if response.status_code == 400:
        raise RefusedError(f"{path}: {_message(response)}")
    if response.is_error:
        raise MemguardError(f"{url}{path} answered {response.status_code}: {_message(response)}")


def _message(response: httpx.Response) -> str:
    """The engine's own words: {"error": {"message": ...}}, or the start of whatever came."""
    try:
        error = response.json()["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return response.text.strip()[:300] or "no explanation"

"""`http`: calls a URL, so that somebody can schedule a webhook from psql alone (extra `http`).

    select almanac.enqueue('default', 'http', '{"url": "https://example.org/hook", "json": {"n": 1}}');

The request carries `Idempotency-Key`, the same over all attempts. What may be called is the worker's to decide, not the
payload's: hosts can be limited to a list, and addresses inside the network are refused unless they are on it. The
address that was checked is the one that is connected to, so a name cannot change its mind in between.
"""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import ipaddress
import json
import re
import socket
import ssl
import time
import zlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import cached_property
from typing import Annotated, Any, Literal

import httpx
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from pyclient import errors
from pyclient.context import JobContext
from pyclient.outcomes import PermanentError, RetryAfter
from pyclient.settings import HttpPolicy

RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504}) | frozenset(range(505, 600))
LONGEST_RETRY_AFTER = timedelta(days=1)
REDIRECTS = 5
KEPT = 10_000
# Who is asked, and where the request ends, is not the payload's to say.
OURS = frozenset({"host", "content-length", "transfer-encoding"})
# Inside the network, or a way into it, though the standard library has them for global.
INSIDE = [ipaddress.ip_network(one) for one in ("::/96", "::ffff:0:0:0/96", "64:ff9b:1::/48", "fec0::/10")]


class Request(BaseModel):
    """What a job of type http has in its payload."""

    model_config = ConfigDict(extra="forbid")

    url: str
    method: Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"] = "POST"
    headers: dict[str, str] = {}
    json_: Annotated[Any, Field(alias="json")] = None
    body: str | None = None
    timeout: Annotated[float, Field(gt=0, le=600)] = 30.0

    @field_validator("headers")
    @classmethod
    def _can_be_sent(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, value in headers.items():
            if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name) or not re.fullmatch(r"[\t -~]*", value):
                raise ValueError(f"{name!r} is not a name and a value in one line of ASCII")
            if name.lower() in OURS:
                raise ValueError(f"{name!r} is set by the worker")
        return headers

    @model_validator(mode="after")
    def _one_body(self) -> "Request":
        if self.json_ is not None and self.body is not None:
            raise ValueError("give json or body, not both")
        return self


class Refused(PermanentError):
    """The worker is not allowed to call this."""


class HttpHandler:
    """`app.register("http", HttpHandler(policy))`; the worker makes one from its settings."""

    def __init__(self, policy: HttpPolicy | None = None) -> None:
        self.policy = policy or HttpPolicy()
        if self.policy.secret is not None:
            _key(self.policy.secret)
        self.__name__ = self.__qualname__ = "http"

    async def __call__(self, ctx: JobContext, payload: Request) -> dict[str, Any]:
        """Call a URL."""
        content, headers = self._content(ctx, payload)
        try:
            async with asyncio.timeout(payload.timeout):
                response, text = await self._follow(payload, headers, content)
        except TimeoutError:
            raise TimeoutError(f"no answer within {payload.timeout:g} s") from None
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise PermanentError(f"cannot call this: {error}") from None
        kept = {
            "status": response.status_code,
            "headers": {
                name: value
                for name, value in response.headers.items()
                if name.lower() in ("content-type", "location", "retry-after", "x-request-id")
            },
            "body": text[:KEPT],
            "truncated": len(text) > KEPT,
        }
        said = f"{response.status_code} {response.reason_phrase}: {text[:500]}".strip().rstrip(":")
        if response.is_success:
            ctx.external_id = response.headers.get("x-request-id")
            return kept
        if response.status_code in RETRIED:
            if (delay := retry_after(response.headers.get("retry-after"))) is not None:
                raise RetryAfter(delay, said)
            raise ConnectionError(said)
        raise PermanentError(said)

    def _content(self, ctx: JobContext, payload: Request) -> tuple[bytes | None, dict[str, str]]:
        headers = {name.lower(): value for name, value in payload.headers.items()}
        content = payload.body.encode() if payload.body is not None else None
        if payload.json_ is not None:
            content = json.dumps(payload.json_, ensure_ascii=False).encode()
            headers.setdefault("content-type", "application/json")
        headers.setdefault("user-agent", "pg_almanac")
        # Not asked for: who unpacks what others have packed has to reckon with a thousand times as much.
        headers.setdefault("accept-encoding", "identity")
        key = headers["idempotency-key"] = ctx.idempotency_key
        if self.policy.secret is not None:
            headers |= sign(self.policy.secret, key, content or b"")
        return content, headers

    async def _follow(
        self, payload: Request, headers: Mapping[str, str], content: bytes | None
    ) -> tuple[httpx.Response, str]:
        """Redirects by hand: each new address is checked as the first one was. Only what is safe to repeat is."""
        url, method, sent = httpx.URL(payload.url), str(payload.method), dict(headers)
        for _ in range(REDIRECTS + 1):
            response, text = await self._send(method, url, sent, content)
            if not response.has_redirect_location:
                return response, text
            target = url.join(response.headers["location"])
            if response.status_code in (301, 302, 303) and method not in ("GET", "HEAD"):
                method, content = "GET", None
                sent.pop("content-type", None)
            if (target.scheme, target.host, target.port) != (url.scheme, url.host, url.port):
                # Signature and credentials were for the first one.
                sent = {
                    name: value
                    for name, value in sent.items()
                    if name not in ("authorization", "cookie") and not name.startswith("webhook-")
                }
            url = target
        raise PermanentError(f"more than {REDIRECTS} redirects")

    async def _send(
        self, method: str, url: httpx.URL, headers: dict[str, str], content: bytes | None
    ) -> tuple[httpx.Response, str]:
        if url.scheme not in ("http", "https") or not url.host:
            raise Refused("cannot call this: only http and https URLs with a host can be called")
        address = await self._address(url.host, url.port or (443 if url.scheme == "https" else 80))
        # A client for each request: it would keep cookies and connections by the address, which several hosts can have.
        # No proxy from the environment: it would connect to whatever it is asked to.
        client = httpx.AsyncClient(verify=self._tls, trust_env=False, timeout=None, follow_redirects=False)
        async with (
            client,
            # Connect to the address that was checked; the name stays for TLS and for the Host header.
            client.stream(
                method,
                url.copy_with(host=address),
                headers={**headers, "host": url.netloc.decode()},
                content=content,
                extensions={"sni_hostname": url.host},
            ) as response,
        ):
            # Read no more than is kept, however much is sent.
            read = bytearray()
            async for part in response.aiter_raw():
                read += part
                if len(read) > 4 * KEPT:
                    break
            return response, _text(response, bytes(read[: 4 * KEPT]))

    async def _address(self, host: str, port: int) -> str:
        allowed = self.policy.allowed_hosts
        listed = any(
            host == one or (one.startswith("*.") and host.endswith(one[1:])) for one in map(str.lower, allowed)
        )
        if allowed and not listed:
            raise Refused(
                f"host {host} is not on the list of hosts that may be called (the worker's ALMANAC_HTTP_HOSTS)"
            )
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            raise ConnectionError(f"host {host} cannot be found: {error.strerror}") from None
        except UnicodeError:
            raise PermanentError(f"cannot call this: {host} is not the name of a host") from None
        addresses = [str(entry[4][0]) for entry in found]
        if not listed and not self.policy.allow_private:
            for address in addresses:
                if not is_public(address):
                    raise Refused(
                        f"host {host} is {address}, which is inside the network and may not be called unless the "
                        "worker has it in ALMANAC_HTTP_HOSTS, or ALMANAC_HTTP_PRIVATE=1"
                    )
        return addresses[0]

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return httpx.create_ssl_context(trust_env=False)


def _text(response: httpx.Response, read: bytes) -> str:
    """As far as it was read; also when it is packed though nobody asked for that, or in a charset of the sender's."""
    if response.headers.get("content-encoding", "").strip().lower() in ("gzip", "x-gzip"):
        with contextlib.suppress(zlib.error):
            read = zlib.decompressobj(wbits=31).decompress(read, 4 * KEPT)
    try:
        text = read.decode(response.charset_encoding or "utf-8", "replace")
    except (LookupError, ValueError):
        text = read.decode("utf-8", "replace")
    return text.encode("utf-8", "replace").decode()


def is_public(address: str) -> bool:
    """Whether it is somewhere on the internet; also for IPv4 inside IPv6."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is None and ip in ipaddress.ip_network("64:ff9b::/96"):
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if any(ip in network for network in INSIDE):
            return False
    return ip.is_global and not ip.is_multicast


def _key(secret: str) -> bytes:
    if not secret.startswith("whsec_"):
        return secret.encode()
    try:
        return base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except ValueError:
        raise errors.AlmanacError(
            "the secret that requests are signed with is not base64 after whsec_", hint="Correct ALMANAC_HTTP_SECRET."
        ) from None


def sign(secret: str, message_id: str, content: bytes, at: float | None = None) -> dict[str, str]:
    """The headers of Standard Webhooks: the receiver can check who sent it, and when."""
    timestamp = str(int(time.time() if at is None else at))
    signed = b".".join([message_id.encode(), timestamp.encode(), content])
    signature = base64.b64encode(hmac.new(_key(secret), signed, hashlib.sha256).digest()).decode()
    return {"webhook-id": message_id, "webhook-timestamp": timestamp, "webhook-signature": f"v1,{signature}"}


def retry_after(value: str | None) -> timedelta | None:
    """Seconds or a date; at most a day, and never into the past."""
    if not value:
        return None
    if re.fullmatch(r"[0-9]+", value.strip()):
        return min(timedelta(seconds=min(float(value), 10**6)), LONGEST_RETRY_AFTER)
    try:
        at = parsedate_to_datetime(value)
    except ValueError:
        return None
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return min(max(at - datetime.now(UTC), timedelta(0)), LONGEST_RETRY_AFTER)


__all__: Sequence[str] = ["HttpHandler", "Refused", "Request", "is_public", "retry_after", "sign"]

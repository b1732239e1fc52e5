"""What can go wrong with a request to the API server, classified once.

Every failure of `llmkube.kube.client` is one of these classes; callers match on the class, never
on numbers or texts. Retry policy does not live here but in the worker (`informers.worker`) and in
the loops of the agent and the edge.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any


class ApiError(Exception):
    """The API server refused a request, or could not be reached.

    `status` is the HTTP status, 0 where no answer came. `reason` is the Status object's reason
    (for example "NotFound"). `message` is the server's own explanation.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        reason: str = "",
        retry_after: timedelta | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.reason = reason
        self.retry_after = retry_after


class NotFound(ApiError):
    """404: no such object, or no such resource (a missing CRD)."""


class AlreadyExists(ApiError):
    """409 with reason AlreadyExists: a create met an object of that name."""


class Conflict(ApiError):
    """409: the object is not at the resourceVersion or UID that the write named."""


class Gone(ApiError):
    """410, or 504 for a resourceVersion in the future: list again."""


class Invalid(ApiError):
    """400 or 422: the object breaks its schema or a validation rule; a retry is no use."""


class Unauthorized(ApiError):
    """401: the credential is missing, expired or revoked."""


class Forbidden(ApiError):
    """403: RBAC or admission refused."""


class TooLarge(ApiError):
    """413: the request is larger than the API server takes."""


class TooManyRequests(ApiError):
    """429: API Priority and Fairness asks to wait; `retry_after` says how long."""


class Unavailable(ApiError):
    """5xx, a broken connection, a timeout: the server may or may not have acted."""


class NotLeader(ApiError):
    """This process may not write (any more): the write was refused here and never sent."""


class ConfigError(Exception):
    """The kubeconfig or in-cluster configuration cannot be used; the text says what to change.

    Raised while loading `llmkube.kube.config.Access`, never by a request. It names files, keys
    and contexts, never the values of credentials.
    """


_BY_STATUS: dict[int, type[ApiError]] = {
    400: Invalid,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    413: TooLarge,
    422: Invalid,
    429: TooManyRequests,
}


def from_status(status: int, body: bytes, retry_after: timedelta | None = None) -> ApiError:
    """The error for an HTTP answer. `body` is a metav1.Status, or any text a proxy made up."""
    details = _parse_status(body)
    reason = str(details.get("reason") or "")
    message = str(details.get("message") or "") or _excerpt(body) or f"HTTP {status}"
    cls = _BY_STATUS.get(status, Unavailable)
    if status == 409 and reason == "AlreadyExists":
        cls = AlreadyExists
    elif reason in ("Expired", "Gone") or (
        status == 504 and "too large resource version" in message.lower()
    ):
        cls = Gone
    return cls(message, status=status, reason=reason, retry_after=retry_after)


def _parse_status(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) and value.get("kind") == "Status" else {}


def _excerpt(body: bytes) -> str:
    return " ".join(body[:200].decode("utf-8", "replace").split())

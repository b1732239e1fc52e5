"""The parts that both kinds share: model base, ObjectMeta, Condition, and the scalar types.

These pydantic types are the complete contract: `config/crd` is generated from them (`crdgen`), and
the CLI and everything else that is not hot reads and writes objects through them. They say what the
API server's schema says, no more: the same patterns, limits and required fields. Unknown fields are
ignored, as the API server prunes them. Hot paths use `cached` instead.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
)
from pydantic.alias_generators import to_camel

from llmkube.api.times import format_micro_time, format_time, parse_time


def _read_time(value: object) -> object:
    if isinstance(value, str):
        instant = parse_time(value)
        if instant is None:
            raise ValueError("not an RFC 3339 timestamp")
        return instant
    if isinstance(value, datetime) and value.tzinfo is None:
        raise ValueError("a timestamp needs a time zone")
    return value


def _write_time(instant: datetime) -> str:
    return format_micro_time(instant) if instant.microsecond else format_time(instant)


Time = Annotated[
    datetime,
    BeforeValidator(_read_time),
    PlainSerializer(_write_time, return_type=str),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
"""An instant, aware. Written in UTC; with six digits where it has a fraction."""
Int32 = Annotated[int, Field(json_schema_extra={"format": "int32"})]
Int64 = Annotated[int, Field(json_schema_extra={"format": "int64"})]

DNS_SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"


class ApiModel(BaseModel):
    """An object or a part of one: snake_case here, camelCase on the wire."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="ignore",
        frozen=True,
    )

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Parse a decoded JSON value. Raises pydantic.ValidationError."""
        return cls.model_validate(value)

    def to_json(self) -> dict[str, Any]:
        """The wire form: camelCase, absent fields left out."""
        return self.model_dump(by_alias=True, exclude_none=True, mode="json")


class OwnerReference(ApiModel):
    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool | None = None
    block_owner_deletion: bool | None = None


class ObjectMeta(ApiModel):
    """The part of metav1.ObjectMeta that we use. The schema leaves metadata to the API server."""

    name: str | None = None
    namespace: str | None = None
    uid: str | None = None
    resource_version: str | None = None
    generation: int | None = None
    creation_timestamp: Time | None = None
    deletion_timestamp: Time | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owner_references: list[OwnerReference] | None = None


API_VERSION_TEXT = (
    "APIVersion defines the versioned schema of this representation of an object. Servers should"
    " convert recognized schemas to the latest internal value, and may reject unrecognized values."
    " More info: https://git.k8s.io/community/contributors/devel/sig-architecture/"
    "api-conventions.md#resources"
)
KIND_TEXT = (
    "Kind is a string value representing the REST resource this object represents. Servers may"
    " infer this from the endpoint the client submits requests to. Cannot be updated. In CamelCase."
    " More info: https://git.k8s.io/community/contributors/devel/sig-architecture/"
    "api-conventions.md#types-kinds"
)


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(ApiModel):
    """metav1.Condition."""

    last_transition_time: Time = Field(
        description="lastTransitionTime is the last time the condition transitioned from one status"
        " to another. This should be when the underlying condition changed. If that is not known,"
        " then using the time when the API field changed is acceptable."
    )
    message: str = Field(
        max_length=32768,
        description="message is a human readable message indicating details about the transition."
        " This may be an empty string.",
    )
    observed_generation: Int64 | None = Field(
        None,
        ge=0,
        description="observedGeneration represents the .metadata.generation that the condition was"
        " set based upon. For instance, if .metadata.generation is currently 12, but the"
        " .status.conditions[x].observedGeneration is 9, the condition is out of date with respect"
        " to the current state of the instance.",
    )
    reason: str = Field(
        min_length=1,
        max_length=1024,
        pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
        description="reason contains a programmatic identifier indicating the reason for the"
        " condition's last transition. Producers of specific condition types may define expected"
        " values and meanings for this field, and whether the values are considered a guaranteed"
        " API. The value should be a CamelCase string. This field may not be empty.",
    )
    status: ConditionStatus = Field(
        description="status of the condition, one of True, False, Unknown."
    )
    type: str = Field(
        max_length=316,
        pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
        r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$",
        description="type of condition in CamelCase or in foo.example.com/CamelCase.",
    )


def list_map(*keys: str) -> dict[str, Any]:
    """Schema words for a list that server-side apply merges by those keys."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


ATOMIC_LIST: dict[str, Any] = {"x-kubernetes-list-type": "atomic"}
"""Schema words for a list that has one owner as a whole."""

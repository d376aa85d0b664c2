"""The part of Envoy's ext_proc protocol (envoy.service.ext_proc.v3) and of gRPC's health protocol that is spoken here.

Descriptors are made from the tables below, so that neither generated code nor the 1,800 files of Envoy's whole API are needed: on
the wire a message is its field numbers and types alone. Fields that are not here are passed over when read. The messages carry a
package name of our own, so that they live beside Envoy's real ones in one process.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

PACKAGE: Final = "inferencefleet.epp"
SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH: Final = "grpc.health.v1.Health"
OVERWRITE: Final = 2
"""HeaderValueOption: replace what is there, add what is not."""
NONE, STREAMED, BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX = 0, 1, 2, 3, 4
"""How a body comes (ProcessingMode.BodySendMode)."""
SERVING, NOT_SERVING, UNKNOWN = 1, 2, 3

STRUCT: Final = "google.protobuf.Struct"
TABLE: Final[dict[str, tuple[tuple[str, int, str], ...]]] = {
    "HeaderValue": (("key", 1, "string"), ("value", 2, "string"), ("raw_value", 3, "bytes")),
    "HeaderMap": (("headers", 1, "*HeaderValue"),),
    "HeaderValueOption": (("header", 1, "HeaderValue"), ("append_action", 3, "int32")),
    "HeaderMutation": (("set_headers", 1, "*HeaderValueOption"), ("remove_headers", 2, "*string")),
    "Metadata": (("filter_metadata", 1, f"map {STRUCT}"),),
    "ProtocolConfiguration": (("request_body_mode", 1, "int32"), ("response_body_mode", 2, "int32")),
    "HttpHeaders": (("headers", 1, "HeaderMap"), ("end_of_stream", 3, "bool")),
    "HttpBody": (("body", 1, "bytes"), ("end_of_stream", 2, "bool")),
    "HttpTrailers": (("trailers", 1, "HeaderMap"),),
    "StreamedBodyResponse": (("body", 1, "bytes"), ("end_of_stream", 2, "bool")),
    "BodyMutation": (("body", 1, "?mutation bytes"), ("streamed_response", 3, "?mutation StreamedBodyResponse")),
    "CommonResponse": (("header_mutation", 2, "HeaderMutation"), ("body_mutation", 3, "BodyMutation")),
    "HeadersResponse": (("response", 1, "CommonResponse"),),
    "BodyResponse": (("response", 1, "CommonResponse"),),
    "TrailersResponse": (("header_mutation", 1, "HeaderMutation"),),
    "HttpStatus": (("code", 1, "int32"),),
    "ImmediateResponse": (
        ("status", 1, "HttpStatus"), ("headers", 2, "HeaderMutation"), ("body", 3, "bytes"), ("details", 5, "string"),
    ),
    "ProcessingRequest": (
        ("request_headers", 2, "?request HttpHeaders"), ("response_headers", 3, "?request HttpHeaders"),
        ("request_body", 4, "?request HttpBody"), ("response_body", 5, "?request HttpBody"),
        ("request_trailers", 6, "?request HttpTrailers"), ("response_trailers", 7, "?request HttpTrailers"),
        ("metadata_context", 8, "Metadata"), ("protocol_config", 11, "ProtocolConfiguration"),
    ),
    "ProcessingResponse": (
        ("request_headers", 1, "?response HeadersResponse"), ("response_headers", 2, "?response HeadersResponse"),
        ("request_body", 3, "?response BodyResponse"), ("response_body", 4, "?response BodyResponse"),
        ("request_trailers", 5, "?response TrailersResponse"), ("response_trailers", 6, "?response TrailersResponse"),
        ("immediate_response", 7, "?response ImmediateResponse"), ("dynamic_metadata", 8, STRUCT),
    ),
    "HealthCheckRequest": (("service", 1, "string"),),
    "HealthCheckResponse": (("status", 1, "int32"),),
}  # fmt: skip
"""Message → (field, number, type); `*` repeated, `?GROUP` one of that group, `map` by string."""

_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {
    "string": _FIELD.TYPE_STRING, "bytes": _FIELD.TYPE_BYTES, "bool": _FIELD.TYPE_BOOL, "int32": _FIELD.TYPE_INT32,
}  # fmt: skip


def _typed(field: Any, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _FIELD.TYPE_MESSAGE
        field.type_name = f".{kind}" if "." in kind else f".{PACKAGE}.{kind}"


def _add(message: Any, name: str, number: int, kind: str, groups: dict[str, int]) -> None:
    field = message.field.add(name=name, number=number, label=_FIELD.LABEL_OPTIONAL)
    if kind.startswith("*"):
        field.label, kind = _FIELD.LABEL_REPEATED, kind[1:]
    elif kind.startswith("?"):
        group, _, kind = kind[1:].partition(" ")
        if group not in groups:
            groups[group] = len(groups)
            message.oneof_decl.add(name=group)
        field.oneof_index = groups[group]
    elif kind.startswith("map "):
        entry = message.nested_type.add(name="".join(part.title() for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        _add(entry, "key", 1, "string", {})
        _add(entry, "value", 2, kind[4:], {})
        field.label, kind = _FIELD.LABEL_REPEATED, f"{PACKAGE}.{message.name}.{entry.name}"
    _typed(field, kind)


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="fleet_router/epp.proto", package=PACKAGE, syntax="proto3")
    file.dependency.append(struct_pb2.DESCRIPTOR.name)
    for name, fields in TABLE.items():
        message, groups = file.message_type.add(name=name), dict[str, int]()
        for field, number, kind in fields:
            _add(message, field, number, kind, groups)
    pool = descriptor_pool.Default()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in TABLE}


_MADE = _classes()
ProcessingRequest: Any = _MADE["ProcessingRequest"]
ProcessingResponse: Any = _MADE["ProcessingResponse"]
HealthCheckRequest: Any = _MADE["HealthCheckRequest"]
HealthCheckResponse: Any = _MADE["HealthCheckResponse"]

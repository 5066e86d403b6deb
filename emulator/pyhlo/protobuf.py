"""Protocol-buffer messages from a short text, without a compiler.

A line ``name type number`` is a field; ``*`` before the type makes it repeated; a nested ``...Entry`` makes a map.
The messages live in a pool of their own, so that they never meet another package's registration of the same format.
"""

from __future__ import annotations

import copyreg
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "uint32": _Field.TYPE_UINT32,
    "uint64": _Field.TYPE_UINT64,
    "float": _Field.TYPE_FLOAT,
    "double": _Field.TYPE_DOUBLE,
    "bool": _Field.TYPE_BOOL,
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
}


def build(package: str, enums: dict[str, str], messages: dict[str, str]) -> dict[str, Any]:
    """Message classes by name; a dot nests one message or enum in another.

    ``enums`` maps an enum's name to its values, in order from 0; ``messages`` a message's name to its fields.
    """
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
    made: dict[str, descriptor_pb2.DescriptorProto] = {}
    for name, text in messages.items():
        outer, _, inner = name.rpartition(".")
        message = made[outer].nested_type.add(name=inner) if outer else file.message_type.add(name=inner)
        made[name] = message
        message.options.map_entry = inner.endswith("Entry")
        for line in filter(None, map(str.strip, text.splitlines())):
            _field(message, package, enums, *line.split())
    for name, values in enums.items():
        outer, _, inner = name.rpartition(".")
        enum = made[outer].enum_type.add(name=inner) if outer else file.enum_type.add(name=inner)
        for number, value in enumerate(values.split()):
            enum.value.add(name=value, number=number)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    classes = {n: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{n}")) for n in messages}
    for name, cls in classes.items():
        copyreg.pickle(cls, _Reduce(package, name))  # type: ignore[arg-type]
        _classes[package, name] = cls
    return classes


def _field(message: Any, package: str, enums: dict[str, Any], name: str, kind: str, number: str) -> None:
    field = message.field.add(name=name, number=int(number))
    field.label = _Field.LABEL_REPEATED if kind.startswith("*") else _Field.LABEL_OPTIONAL
    kind = kind.lstrip("*")
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _Field.TYPE_ENUM if kind in enums else _Field.TYPE_MESSAGE
        field.type_name = f".{package}.{kind}"


_classes: dict[tuple[str, str], Any] = {}


def _parse(package: str, name: str, data: bytes) -> Any:
    return _classes[package, name].FromString(data)


class _Reduce:
    """How a message of one class is pickled: hosts compile their graphs in other processes."""

    def __init__(self, package: str, name: str) -> None:
        self.package, self.name = package, name

    def __call__(self, message: Any) -> Any:
        return _parse, (self.package, self.name, message.SerializeToString())

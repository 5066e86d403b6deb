"""Build protocol-buffer message classes from a short text, without protoc.

A line ``name type number`` declares a field; ``*`` before the type makes it repeated; a nested message ``...Entry``
makes a map. Every package has its own descriptor pool, so it cannot conflict with another registration of the same
messages.
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
    """Return message classes by name; a dot in a name nests a message or enum in another message.

    Args:
        package: the package's name.
        enums: enum name -> its values, numbered from 0.
        messages: message name -> its fields, one per line.
    """
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
    descriptors: dict[str, descriptor_pb2.DescriptorProto] = {}
    for name, text in messages.items():
        outer, _, inner = name.rpartition(".")
        message = descriptors[outer].nested_type.add(name=inner) if outer else file.message_type.add(name=inner)
        descriptors[name] = message
        message.options.map_entry = inner.endswith("Entry")
        for line in filter(None, map(str.strip, text.splitlines())):
            _add_field(message, package, enums, *line.split())
    for name, values in enums.items():
        outer, _, inner = name.rpartition(".")
        enum = descriptors[outer].enum_type.add(name=inner) if outer else file.enum_type.add(name=inner)
        for number, value in enumerate(values.split()):
            enum.value.add(name=value, number=number)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    classes = {n: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{n}")) for n in messages}
    for name, cls in classes.items():
        copyreg.pickle(cls, _Pickler(package, name))  # type: ignore[arg-type]
        _classes[package, name] = cls
    return classes


def _add_field(message: Any, package: str, enums: dict[str, Any], name: str, kind: str, number: str) -> None:
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


class _Pickler:
    """Pickles messages of one class; hosts send graphs to other processes to compile them."""

    def __init__(self, package: str, name: str) -> None:
        self.package, self.name = package, name

    def __call__(self, message: Any) -> Any:
        return _parse, (self.package, self.name, message.SerializeToString())

"""Frozen records without `dataclasses`.

`agentkernel run` has to start quickly, and importing `dataclasses` (with inspect, re and enum) takes as long as
starting Python. A record's fields are its class's annotations, their defaults its attributes.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ClassVar, Self, dataclass_transform
else:

    def dataclass_transform(**_):
        return lambda kind: kind


@dataclass_transform(frozen_default=True, kw_only_default=False)
class Record:
    if TYPE_CHECKING:
        field_names: ClassVar[tuple[str, ...]]
    else:
        field_names = ()

    def __init_subclass__(cls) -> None:
        cls.field_names = tuple(cls.__annotations__)

    def __init__(self, *values: Any, **named: Any) -> None:
        names = self.field_names
        if len(values) > len(names):
            raise TypeError(f"{type(self).__name__} has {len(names)} fields")
        given = dict(zip(names, values, strict=False))
        for name, value in named.items():
            if name not in names or name in given:
                raise TypeError(f"{type(self).__name__} has no field {name}, or has it twice")
            given[name] = value
        for name in names:
            if name not in given:
                if not hasattr(type(self), name):
                    raise TypeError(f"{type(self).__name__} needs {name}")
                given[name] = getattr(type(self), name)
        self.__dict__.update(given)

    def but(self, **changes: Any) -> Self:
        """Returns a copy with other values."""
        return type(self)(**{**self.__dict__, **changes})

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__[name] for name in self.field_names))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={self.__dict__[name]!r}' for name in self.field_names)})"

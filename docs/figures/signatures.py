"""Shows the fields of `PrepareConfig` in the reference, wherever the code has `**fields`, and examples as code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

SAID = "The other keywords are the fields of [`PrepareConfig`][kbitwrap.PrepareConfig].\n\nArgs:\n"


class Fields(griffe.Extension):
    """Puts the fields with their defaults into signatures, and one sentence into docstrings."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Call a docstring's example what griffe shows as code: the event of griffe for each object."""
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Expand a package: the event of griffe when all of it is loaded."""
        fields = [_keyword(field) for field in pkg["config.PrepareConfig"].attributes.values() if _is_field(field)]
        for owner, function in _functions(pkg):
            if "fields" in function.parameters and owner.docstring:
                own = [parameter for parameter in function.parameters if parameter.name != "fields"]
                named = {parameter.name for parameter in own}
                function.parameters = griffe.Parameters(*own, *(field for field in fields if field.name not in named))
                described = re.sub(r"\n +\*\*fields: Fields of ``PrepareConfig``.*", "", owner.docstring.value)
                owner.docstring.value = described.replace("Args:\n", SAID, 1)


def _is_field(attribute: griffe.Attribute) -> bool:
    return attribute.annotation is not None and "property" not in attribute.labels


def _keyword(field: griffe.Attribute) -> griffe.Parameter:
    factory = re.fullmatch(r"field\(default_factory=lambda: (.*)\)", str(field.value))
    default = factory[1] if factory else field.value
    return griffe.Parameter(
        field.name, annotation=field.annotation, kind=griffe.ParameterKind.keyword_only, default=default
    )


def _functions(parent: griffe.Module | griffe.Class) -> Iterator[tuple[griffe.Object, griffe.Function]]:
    """The functions of a package, and whose docstring describes them: its own, or the class's for `__init__`."""
    for member in parent.members.values():
        if not member.is_alias and member.is_function:
            yield parent if member.name == "__init__" else member, member
        elif not member.is_alias and (member.is_module or member.is_class):
            yield from _functions(member)

"""Keep docstrings in the language of the field: each names its object, none begins as a clause."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
FOLDERS = ("torchrec_checknrun", "recipes", "examples", "tests")
CLAUSE = re.compile(r"(What|Whether|Of|How|Where|It|Its|This|That|They|These|Those)\b")
"""First words after which a docstring names no object, or leaves it to the name above."""
VERB = re.compile(r"(Return|Tell|Describe|Name)\b")
"""First words of a property's docstring, which is a function's."""


PRONOUN = re.compile(r"(?:^|[.:;]\s+)(It|They|She|He)\s+[a-z]")
"""A sentence whose subject is a pronoun."""


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Yield the line, the text and, for attributes' too, whether a property has the docstring."""
    of_properties = {
        id(node.body[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any("property" in ast.unparse(each) for each in node.decorator_list)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = node.value.value
            if isinstance(text, str):
                yield node.lineno, text, id(node) in of_properties


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_a_verb_or_a_noun(folder: str) -> None:
    seen, wrong = 0, []
    for path in sorted((REPOSITORY / folder).rglob("*.py")):
        for line, text, of_property in docstrings(ast.parse(path.read_text())):
            seen += 1
            clause = CLAUSE.match(text) or PRONOUN.search(text)
            if clause or (of_property and not VERB.match(text)):
                wrong.append(f"{path.relative_to(REPOSITORY)}:{line}: {text[:60]!r}")
    assert seen > 10
    assert not wrong, (
        "begin with a verb (a function, a property) or name the object (all else); no pronoun is "
        "a sentence's subject"
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            '"""Module."""\nx = 1\n"""An attribute."""',
            [("Module.", False), ("An attribute.", False)],
        ),
        ('@property\ndef f():\n    """Return."""', [("Return.", True)]),
        ('@cached_property\ndef f():\n    """Return."""', [("Return.", True)]),
        ('def f():\n    """Do."""\n    return """no docstring"""', [("Do.", False)]),
    ],
)
def test_all_docstrings_are_found(source: str, expected: list[tuple[str, bool]]) -> None:
    assert [(text, prop) for _, text, prop in docstrings(ast.parse(source))] == expected

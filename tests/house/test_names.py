"""Names and comments: a class name stands once, a field is explained at the field, nothing is squeezed."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.house.sources import PACKAGES, name, nodes, python_files

# Public faces that must carry another library's names.
SHARED_NAMES = {"Config"}


def classes(path: Path) -> Iterator[ast.ClassDef]:
    return (node for node in nodes(path.read_text()) if isinstance(node, ast.ClassDef))


def test_a_class_name_stands_once():
    places = defaultdict(list)
    for path in python_files(*PACKAGES, "benchmarks"):
        for node in classes(path):
            places[node.name].append(f"{name(path)}:{node.lineno}")
    twice = {one: where for one, where in places.items() if len(where) > 1 and one not in SHARED_NAMES}
    assert not twice, "\n".join(f"{one}: {', '.join(where)}" for one, where in sorted(twice.items()))


def is_record(node: ast.ClassDef) -> bool:
    """A dataclass, a NamedTuple or a Protocol: a class whose fields are declared in its body."""
    bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
    decorators = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
    return bool(bases & {"NamedTuple", "Protocol"}) or any(
        isinstance(d, ast.Name) and d.id == "dataclass" for d in decorators
    )


def declared(node: ast.ClassDef) -> set[str]:
    """The fields that a class body declares."""
    return {
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }


NAME = r"[a-z]\w*(?: \[[^]\n]*\])?"
EXPLAINED = re.compile(rf"(?:^|[.;] )({NAME}(?:, {NAME})*): ", re.MULTILINE)


def explained(docstring: str) -> set[str]:
    """Names that a docstring explains as `name: ...` or `first, second: ...`, at a line's or a sentence's beginning."""
    names: set[str] = set()
    for match in EXPLAINED.finditer(docstring):
        names |= set(re.findall(r"[a-z]\w*", re.sub(r"\[[^]]*\]", "", match[1])))
    return names


def test_fields_are_explained_where_they_are_declared():
    """A class docstring says what the record is for; a comment at the field says what the field holds."""
    wrong = [
        f"{name(path)}:{node.lineno}: {node.name}: {', '.join(sorted(far))}"
        for path in python_files(*PACKAGES)
        for node in classes(path)
        if is_record(node) and (far := explained(ast.get_docstring(node) or "") & declared(node))
    ]
    assert not wrong, "\n".join(wrong)


def known_in(node: ast.ClassDef) -> set[str]:
    """Every name in the class: fields, attributes set on self, methods, parameters."""
    names = declared(node)
    for item in ast.walk(node):
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(item.name)
            arguments = item.args
            names |= {a.arg for a in (*arguments.args, *arguments.kwonlyargs, *arguments.posonlyargs)}
            names |= {a.arg for a in (arguments.vararg, arguments.kwarg) if a is not None}
        elif isinstance(item, ast.Attribute) and isinstance(item.value, ast.Name) and item.value.id == "self":
            names.add(item.attr)
        elif isinstance(item, ast.Name):
            names.add(item.id)
    return names


def test_a_name_that_a_docstring_explains_exists():
    """`some_name: ...` in a docstring names a field, an attribute or a parameter of that class or function."""
    wrong = []
    for path in python_files(*PACKAGES):
        for node in nodes(path.read_text()):
            if isinstance(node, ast.ClassDef):
                names, inherits = known_in(node), bool(node.bases)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names, inherits = {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}, False
                names |= {item.arg for item in ast.walk(node) if isinstance(item, ast.arg)}
                names |= {item.attr for item in ast.walk(node) if isinstance(item, ast.Attribute)}
                names |= {str(item.value) for item in ast.walk(node) if isinstance(item, ast.Constant)}
            else:
                continue
            told = {one for one in explained(ast.get_docstring(node) or "") if "_" in one}
            if (missing := told - names) and not inherits:
                wrong.append(f"{name(path)}:{node.lineno}: {node.name}: no {', '.join(sorted(missing))}")
    assert not wrong, "\n".join(wrong)


def test_nothing_is_squeezed_to_stay_short():
    """The formatter lays out every line: a file at its limit is split by nouns."""
    wrong = [
        f"{name(path)}:{number}"
        for path in python_files()
        if name(path) != "tests/house/test_names.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"#\s*fmt:\s*(skip|off)", line)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_readers_see_what_they_must():
    text = "A record. max_rows: the most. first, second: both [T, K]. x_TH [T, H]: tokens\nmode: of the call."
    assert explained(text) == {"max_rows", "first", "second", "x_TH", "mode"}
    node = ast.parse("class A(NamedTuple):\n    x: int\n    def f(self, y): self.z = 1").body[0]
    assert isinstance(node, ast.ClassDef) and is_record(node)
    assert declared(node) == {"x"} and {"x", "f", "y", "z"} <= known_in(node)

"""The private modules of the standard library and torch that we use exist and do what we rely on.

A failure here, after an upgrade, says what to adapt: `reads/files/header_regex.py`, `classic/unpickle.py` or
`core/torch_data.py`.
"""

import ast
import importlib
import io
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

from millstream.classic.limits import Input
from millstream.classic.unpickle import Unpickler
from millstream.reads.files.header_regex import ALL, DIGITS, Anchor, Either, Group, Other, Repeat, Run, tree_of

SOURCE = Path(__file__).parents[1] / "src"
NOT_PRIVATE = {"os._exit", "_typeshed.DataclassInstance"}  # documented; types only


def private_uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and dotted name of every private name that is imported, or taken from an imported module."""
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            modules |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            yield from ((node.lineno, prefix + alias.name) for alias in node.names)
    for node in ast.walk(tree):
        root = node
        while isinstance(root, ast.Attribute):
            root = root.value
        if root is not node and isinstance(root, ast.Name) and root.id in modules:
            yield node.lineno, ast.unparse(node)


def test_a_private_module_is_used_only_below_a_comment_that_says_why() -> None:
    for file in SOURCE.rglob("*.py"):
        text = file.read_text()
        for number, name in private_uses(ast.parse(text)):
            if re.fullmatch(r"(\w+\.)*_[^_][\w.]*", name) and name not in NOT_PRIVATE:
                above = "".join(text.splitlines()[max(number - 4, 0) : number - 1])
                explained = "# Private, but" in above and "tests/test_private_modules.py" in above
                assert explained, f"{file}:{number} uses {name}"


def test_re_still_parses_a_regex_into_the_opcodes_that_header_trees_are_made_of() -> None:
    parser = getattr(re, "_parser", None)
    assert parser is not None, "re._parser is gone: header_regex.tree_of needs another parser of regexes"
    parsed = parser.parse(r"^(?P<x>a|b+)[^c]*?\d{2}.(?=d)$", re.ASCII)
    opcodes = [str(op) for op, _ in parsed]
    assert opcodes == ["AT", "SUBPATTERN", "MIN_REPEAT", "MAX_REPEAT", "ANY", "ASSERT", "AT"]
    assert parsed.state.groupdict == {"x": 1} and parsed.state.flags & re.ASCII


def test_a_header_tree_is_what_its_regex_says() -> None:
    not_c = ALL & ~(1 << ord("c"))
    assert tree_of(r"^(?P<x>a|bb+)[^c]*?\d{2}.(?=d)$") == (
        Anchor(at_end=False),
        Group("x", (Either(((Run(1 << 97),), (Run(1 << 98), Run(1 << 98, 1, 1 << 62)))),)),
        Repeat((Run(not_c),), 0, 1 << 62, lazy=True),
        Run(DIGITS, 2, 2),
        Run(ALL),
        Other(((Run(1 << 100),),)),
        Anchor(at_end=True),
    )


def test_the_pure_python_unpickler_still_has_the_parts_that_ours_is_made_of() -> None:
    base = getattr(pickle, "_Unpickler", None)
    assert base is not None, "pickle._Unpickler is gone: classic/unpickle.py needs a stack machine of its own"
    assert issubclass(Unpickler, base)
    for name in ("load_mark", "load_tuple", "load_binint", "load_none", "load_stop", "pop_mark", "dispatch"):
        assert hasattr(base, name), f"pickle._Unpickler.{name} is gone"


def test_values_of_every_protocol_are_unpickled() -> None:
    value = {"traces": [1, 2**70, -1.5, None, True, "text", b"bytes", ("a", "b", "c"), [[], {}]], "n": (1,)}
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps(value, protocol)
        assert Unpickler(Input(io.BytesIO(data), len(data))).load() == value


def test_torch_still_collates_by_a_map_from_types_to_functions() -> None:
    collate = importlib.import_module("torch.utils.data._utils.collate")
    known = getattr(collate, "default_collate_fn_map", None)
    assert known is not None, "default_collate_fn_map is gone: core/torch_data.py needs another way to make batches"

    class Marked:
        pass

    known[Marked] = lambda batch, *, collate_fn_map=None: len(batch)
    try:
        assert collate.default_collate([Marked(), Marked()]) == 2
    finally:
        del known[Marked]

"""Mutations of a module, each of one line: what scripts/mutants.py records."""

from __future__ import annotations

import ast
import io
import json
import random
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

COMPARED: dict[type[ast.cmpop], tuple[str, ...]] = {
    **{ast.Lt: ("<=", ">="), ast.LtE: ("<", ">"), ast.Gt: (">=", "<="), ast.GtE: (">", "<")},
    **{ast.Eq: ("!=",), ast.NotEq: ("==",), ast.In: ("not in",), ast.NotIn: ("in",)},
    **{ast.Is: ("is not",), ast.IsNot: ("is",)},
}
COMPUTED: dict[type[ast.operator], str] = {
    **{ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Mod: "//"},
    **{ast.LShift: ">>", ast.RShift: "<<", ast.BitAnd: "|", ast.BitOr: "&"},
}
RETURNED = {"bool": "not ({})", "int": "({}) + 1", "float": "({}) + 1", "str": '""'}
LOGGING = re.compile(r"_?(log|logger|logging)\.\w+|warnings\.warn|print")
SILENT = r"description|help|title|slots|frozen|repr|kw_only|init|exc_info|strict"
"""Keywords of calls that say nothing of what the code does, or that no test can see."""


class Mutation(NamedTuple):
    """A line as it is and as it becomes, both without indentation and comments."""

    source: str
    function: str
    line: int
    original: str
    mutated: str


def mutations(texts: dict[str, str]) -> Iterator[Mutation]:
    """Mutations of these sources, function by function, the same ones each time."""
    dice = random.Random(" ".join(texts))
    groups: dict[tuple[str, str], list[tuple[str, Mutation]]] = defaultdict(list)
    for source, text in texts.items():
        for kind, function, number, original, mutated in Finder(text).found:
            mutation = Mutation(source, function, number, original, mutated)
            groups[source, function].append((kind, mutation))
    turns = list(groups.values())
    dice.shuffle(turns)
    for group in turns:
        dice.shuffle(group)
    used: Counter[object] = Counter()
    while any(turns):
        for group in filter(None, turns):
            best = min(group, key=lambda each: (used[each[1][:3]], used[each[0]]))
            group.remove(best)
            used.update((best[0], best[1][:3]))
            if compiles(with_line(texts[best[1].source], best[1].line, best[1].mutated)):
                yield best[1]


def with_line(text: str, number: int, line: str) -> str:
    """The text with this line, in the indentation of the one that it replaces."""
    lines = text.splitlines(keepends=True)
    before = lines[number - 1]
    lines[number - 1] = before[: len(before) - len(before.lstrip())] + line + "\n"
    return "".join(lines)


def compiles(text: str) -> bool:
    """Whether Python can read a source."""
    try:
        compile(text, "mutated", "exec")
    except SyntaxError:
        return False
    return True


def place_of(
    function: str, line: int, original: str, texts: dict[str, str]
) -> tuple[str, int] | None:
    """Source and line of a mutation: in its function, or anywhere if that is not there."""
    places, elsewhere = [], []
    for source, text in texts.items():
        spans = functions(text)
        numbers = [n for n, each in enumerate(code_lines(text), 1) if each.strip() == original]
        places += [(source, n) for n in numbers if innermost(spans, n) == function]
        if function not in spans and function != "<module>":
            elsewhere += [(source, n) for n in numbers]
    if places:
        return min(places, key=lambda place: abs(place[1] - line))
    return elsewhere[0] if len(elsewhere) == 1 else None


def code_lines(text: str) -> list[str]:
    """The lines of a source without comments."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            number, column = token.start
            lines[number - 1] = lines[number - 1][:column].rstrip()
    return lines


def functions(text: str) -> dict[str, tuple[int, int]]:
    """First and last lines of classes and functions, by their qualified names."""
    spans: dict[str, tuple[int, int]] = {}

    def enter(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own = f"{name}.{child.name}".lstrip(".")
                spans[own] = (child.lineno, child.end_lineno or child.lineno)
                enter(child, own)
            else:
                enter(child, name)

    enter(ast.parse(text), "")
    return spans


def innermost(spans: dict[str, tuple[int, int]], number: int) -> str:
    """The function of a line."""
    around = [name for name, (first, last) in spans.items() if first <= number <= last]
    return max(around, key=lambda name: spans[name][0], default="<module>")


class Finder(ast.NodeVisitor):
    """Finds all mutations: rows of kind, function, line, original and mutated."""

    def __init__(self, text: str) -> None:
        self.lines = code_lines(text)
        self.spans = functions(text)
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        self.tokens = [token for token in tokens if token.type in (tokenize.OP, tokenize.NAME)]
        self.found: list[tuple[str, str, int, str, str]] = []
        self.visit(ast.parse(text))

    def put(self, kind: str, start: tuple[int, int], end: tuple[int, int], text: str) -> None:
        """Add a mutation that has this text from start to end, where both are in one line."""
        line = self.lines[start[0] - 1]
        if start[0] == end[0] and line.isascii():
            mutated = (line[: start[1]] + text + line[end[1] :]).strip()
            place = innermost(self.spans, start[0])
            self.found.append((kind, place, start[0], line.strip(), mutated))

    def replace(self, kind: str, node: Any, form: str) -> None:
        """Add a mutation of a node, whose own text is {} in `form`."""
        if node.lineno == node.end_lineno:
            own = self.lines[node.lineno - 1][node.col_offset : node.end_col_offset]
            text = form.replace("{}", own)
            self.put(kind, (node.lineno, node.col_offset), (node.lineno, node.end_col_offset), text)

    def between(self, kind: str, left: Any, right: Any, text: str) -> None:
        """Add a mutation of the operator between two nodes."""
        start, end = (left.end_lineno, left.end_col_offset), (right.lineno, right.col_offset)
        inside = [each for each in self.tokens if start <= each.start and each.end <= end]
        if words := [each for each in inside if each.string not in ("(", ")")]:
            self.put(kind, words[0].start, words[-1].end, text)

    def starts(self, node: ast.stmt) -> bool:
        """Whether it is in a constructor, whose object would lack an attribute without it."""
        return innermost(self.spans, node.lineno).endswith("__init__")

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if "Protocol" not in map(ast.unparse, node.bases):
            self.visit_all(node.body)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if not {"overload", "abstractmethod"}.intersection(map(ast.unparse, node.decorator_list)):
            defaults = [*node.args.defaults, *node.args.kw_defaults]
            self.visit_all([each for each in defaults if each is not None])
            self.visit_all(node.body)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_all(self, nodes: list[Any]) -> None:
        """Visit each of these nodes."""
        for node in nodes:
            self.visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr | ast.Assert) -> None:
        """Leave texts as they are."""

    visit_Assert = visit_JoinedStr  # noqa: N815

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and "TypeAlias" not in ast.unparse(node.annotation):
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        target = ast.unparse(node.targets[0])
        # The name of a type is written as a class's.
        if target != "__all__" and not re.fullmatch(r"_?[A-Z]\w*[a-z]\w*", target):
            if isinstance(node.targets[0], ast.Attribute) and not self.starts(node):
                self.replace("statement removed", node, "pass")
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.replace("statement removed", node, "pass")
        if operator := COMPUTED.get(type(node.op)):
            self.between("arithmetic", node.target, node.value, f"{operator}=")
        self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        if node.exc is not None and "NotImplemented" not in ast.unparse(node.exc):
            start = node.lineno, node.col_offset
            word = "pass" if ast.unparse(node) == "raise" else ""
            self.put("raise removed", start, (start[0], start[1] + len("raise ")), word)

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(call, ast.Call) and not LOGGING.fullmatch(ast.unparse(call.func)):
            self.replace("statement removed", node, "pass")
            self.visit(call)
        elif not isinstance(call, ast.Constant | ast.Call):
            self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue | ast.Break) -> None:
        self.replace("statement removed", node, "pass")

    visit_Break = visit_Continue  # noqa: N815

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and ast.unparse(node.value) not in ("None", "True", "False"):
            span = self.spans[innermost(self.spans, node.lineno)]
            annotated = re.search(
                r"-> ([^:]+):$", "\n".join(self.lines[span[0] - 1 : span[1]]), re.M
            )
            self.replace(
                "return", node.value, RETURNED.get(annotated[1] if annotated else "", "None")
            )
            self.visit(node.value)

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        test = ast.unparse(node.test)
        if test != "TYPE_CHECKING" and not test.startswith("__name__"):
            if not isinstance(node.test, ast.Compare | ast.UnaryOp | ast.NamedExpr):
                self.replace("condition negated", node.test, "not ({})")
            self.generic_visit(node)

    visit_While = visit_IfExp = visit_If  # noqa: N815

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self.replace("condition negated", test, "not ({})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            start, end = ((each.lineno, each.col_offset) for each in (node, node.operand))
            self.put("condition negated", start, end, "")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, operator, right in zip(
            [node.left, *node.comparators], node.ops, node.comparators, strict=False
        ):
            words = COMPARED[type(operator)]
            kinds = ("boundary", "comparison negated")[-len(words) :]
            for kind, word in zip(kinds, words, strict=True):
                self.between(kind, left, right, word)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word = "or" if isinstance(node.op, ast.And) else "and"
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.between("and, or", left, right, word)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        sides = [ast.unparse(side) for side in (node.left, node.right)]
        texts = [each for each in sides if re.match(r"[bfr]?['\"(]|None$|[A-Z]\w*[a-z]", each)]
        if type(node.op) in COMPUTED and not texts:
            self.between("arithmetic", node.left, node.right, COMPUTED[type(node.op)])
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func)
        if LOGGING.fullmatch(name) or name.endswith(("cast", "TypeVar", "re.compile")):
            return
        if name.endswith((".get", ".pop")) and node.args:
            self.key(node.args[0])
        self.visit_all([node.func, *node.args])
        self.visit_all(
            [each.value for each in node.keywords if not re.fullmatch(SILENT, each.arg or "")]
        )

    def visit_Dict(self, node: ast.Dict) -> None:
        for key in filter(None, node.keys):
            self.key(key)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.key(node.slice)
        if isinstance(node.slice, ast.Slice):
            for bound in filter(None, (node.slice.lower, node.slice.upper)):
                self.replace("slice", bound, "({}) + 1")
        self.generic_visit(node)

    def key(self, node: ast.expr) -> None:
        """Add a mutation of a key that is a text."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value:
            self.replace("key", node, json.dumps(node.value + "_"))

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.replace("constant", node, str(not value))
        elif isinstance(value, int | float):
            self.replace("constant", node, str(value + 1))
            if value:
                self.replace("constant", node, str(value - 1))

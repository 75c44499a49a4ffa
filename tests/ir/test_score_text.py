"""The text form of score programs: printing and parsing are inverse to each other, and what does not
parse is refused with a line, a column and what was expected."""

import pickle
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attngraph.ir.language import expr as E
from attngraph.ir.language import score as S
from attngraph.ir.language.expr import Expr
from attngraph.ir.language.functions import FUNCTIONS
from attngraph.ir.language.parser import operation, parse
from attngraph.ir.language.score import Keep, ProgramError, Score, ScoreProgram, Sink, Weight

_numbers = st.one_of(
    st.integers(-(10**20), 10**20), st.booleans(), st.floats(allow_nan=True, allow_infinity=True)
).map(E.const)
_names = [S.index(n) for n in S.INDICES] + [S.DOT, S.SCORE, E.size("n0"), E.size("n12")]


def _grow(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    calls = [st.builds(operation, st.just(f), *[inner] * row.arity) for f, row in FUNCTIONS.items()]
    binary = st.builds(operation, st.sampled_from(sorted(E.BINARY)), inner, inner)
    unary = st.builds(operation, st.sampled_from(["neg", "not"]), inner)
    reads = st.builds(E.read, st.integers(0, 12), st.lists(inner, max_size=3).map(tuple))
    return st.one_of(binary, unary, reads, *calls)


_trees = st.recursive(st.one_of(_numbers, st.sampled_from(_names)), _grow, max_leaves=12)


@given(_trees)
@settings(max_examples=400)
def test_every_expression_prints_and_parses_back_to_the_identical_object(tree: Expr) -> None:
    program = ScoreProgram((Score(tree),))
    again = parse(str(program))
    assert again.statements[0].value is tree
    assert again == program
    assert str(again) == str(program)


@given(_trees, _trees)
@settings(max_examples=100)
def test_keep_prints_and_parses_back_to_the_identical_object(predicate: Expr, fill: Expr) -> None:
    again = parse(str(ScoreProgram((Keep(predicate, fill),)))).statements[0]
    assert again.predicate is predicate
    assert again.fill is fill


@given(data=st.data())
@settings(max_examples=100)
def test_every_program_prints_and_parses_back_to_itself(data: st.DataObject, language: object) -> None:
    program = data.draw(language.programs())
    assert parse(str(program)) == program
    assert hash(parse(str(program))) == hash(program)
    assert parse(";".join(str(program).splitlines())) == program


@given(_trees)
@settings(max_examples=50)
def test_an_expression_survives_pickling_as_the_identical_object(tree: Expr) -> None:
    assert pickle.loads(pickle.dumps(tree)) is tree


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("s=0.125*dot", "s = 0.125 * dot"),
        ("keep k<=q;keep q-k<4096", "keep k <= q\nkeep q - k < 4096"),
        ("  keep k <= q   # causal; and nothing else", "keep k <= q"),
        ("\n\n s = dot\r\n keep (k <= q)\r\n", "s = dot\nkeep k <= q"),
        ("keep k <= q else -1e9", "keep k <= q else -1000000000.0"),
        ("keep k <= q else -inf", "keep k <= q"),
        ("keep k <= q else -1e999", "keep k <= q"),
        ("s = (dot)", "s = dot"),
        ("s = dot - (q - k)", "s = dot - (q - k)"),
        ("s = dot - q - k", "s = dot - q - k"),
        ("s = -q ** 2", "s = -q ** 2"),
        ("s = (-q) ** 2", "s = (-q) ** 2"),
        ("s = 2 ** -q ** 2", "s = 2 ** -q ** 2"),
        ("s = - 5", "s = -5"),
        ("s = -(5)", "s = -(5)"),
        ("keep not k <= q or b == 0 and h == 1", "keep not k <= q or b == 0 and h == 1"),
        ("keep (not k) <= q", "keep (not k) <= q"),
        ("keep not (k <= q or b == 0)", "keep not (k <= q or b == 0)"),
        ("keep (k <= q) == (b == 0)", "keep (k <= q) == (b == 0)"),
        ("s = dot / (2 * q)", "s = dot / (2 * q)"),
        ("s = r0[] + r1[h, k - q + 127]", "s = r0[] + r1[h, k - q + 127]"),
        ("s = dot * .5", "s = dot * 0.5"),
        ("sink 1; p = p * 2", "sink 1\np = p * 2"),
        ("", ""),
        ("# nothing", ""),
    ],
)
def test_text_has_one_canonical_form(text: str, canonical: str) -> None:
    assert str(parse(text)) == canonical
    assert str(parse(canonical)) == canonical


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("s = 1", "s = 1.0"),
        ("s = 1", "s = true"),
        ("s = 0.0", "s = -0.0"),
        ("s = -5", "s = -(5)"),
        ("s = dot + q + k", "s = dot + (q + k)"),
        ("s = 2 ** 3 ** 2", "s = (2 ** 3) ** 2"),
        ("keep not k == q", "keep (not k) == q"),
    ],
)
def test_different_programs_stay_different(one: str, other: str) -> None:
    assert parse(one) != parse(other)
    assert str(parse(one)) != str(parse(other))


@pytest.mark.parametrize(
    ("text", "line", "column", "words"),
    [
        ("s dot", 1, 3, "expected `=`"),
        ("s = ", 1, 4, "an expression"),
        ("s = dot +", 1, 10, "an expression"),
        ("s = dot dot", 1, 9, "an operator or the end"),
        ("keep", 1, 5, "an expression"),
        ("keep k <= q else", 1, 17, "an expression"),
        ("keep a <= q", 1, 6, "a name of the score language"),
        ("keep 0 <= k <= q", 1, 13, "comparisons do not chain"),
        ("keep k <= q\ns = (dot", 2, 9, "`)`"),
        ("s = dot; keep k < < q", 1, 19, "an expression"),
        ("keep k = q", 1, 8, "an operator or the end"),
        ("drop k <= q", 1, 1, "a statement"),
        ("s = tanh dot", 1, 10, "`(`"),
        ("s = tanh(dot, 1)", 1, 10, "1 argument(s) for tanh()"),
        ("s = where(q, 1)", 1, 11, "3 argument(s)"),
        ("s = min()", 1, 9, "2 argument(s)"),
        ("s = r0", 1, 7, "`[`"),
        ("s = r0[k", 1, 9, "`,` or `]`"),
        ("s = r0[k,]", 1, 10, "an expression"),
        ("s = r[k]", 1, 5, "a name of the score language"),
        ("s = n", 1, 5, "a name of the score language"),
        ("s = dot $ 2", 1, 9, "`$`"),
        ("s = 1..5", 1, 7, "an operator or the end"),
        ("  s = dot @ q", 1, 11, "`@`"),
        ("s = and", 1, 5, "a name of the score language"),
        ("s = 'x'", 1, 5, "an expression"),
        ("s == dot", 1, 3, "expected `=`"),
    ],
)
def test_a_bad_text_is_refused_with_its_place_and_what_was_expected(
    text: str, line: int, column: int, words: str
) -> None:
    with pytest.raises(ProgramError) as caught:
        parse(text)
    message = str(caught.value)
    found = re.search(r"line (\d+), column (\d+)", message)
    assert found, message
    assert (int(found[1]), int(found[2])) == (line, column), message
    assert words in message
    shown, caret = message.splitlines()[-2:]
    assert shown[2:] == text.split("\n")[line - 1]
    assert caret == "  " + " " * (column - 1) + "^"


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("keep k <= qq", "did you mean `q`?"),
        ("s = tahn(dot)", "did you mean `tanh`?"),
        ("s = Dot * 2", "did you mean `dot`?"),
        ("s = maximum(dot, 3)", "did you mean `max`?"),
        ("kep k <= q", "did you mean `keep`?"),
        ("S = dot", "did you mean `s`?"),
        ("keep k <= q && k > 3", "did you mean `and`?"),
        ("keep k = q", "did you mean `==`?"),
        ("keep !k", "did you mean `not`?"),
        ("s = dot ^ 2", "did you mean `**`?"),
        ("keep k <= q esle 5", "did you mean `else`?"),
        ("s = r0", "`r0` is a tensor"),
        ("s = r0(k)", "`r0` is a tensor"),
        ("s = r0[b][k]", "all indices stand in one bracket"),
        ("s = r[k]", "a tensor is `r0[..]`"),
        ("s = n * dot", "a size is `n0`"),
        ("s = k(3)", "`k` is a value, it takes no arguments"),
    ],
)
def test_a_word_that_is_nearly_right_is_told_what_may_be_meant(text: str, meant: str) -> None:
    with pytest.raises(ProgramError) as caught:
        parse(text)
    message, _, caret = str(caught.value).splitlines()
    assert meant in message
    assert caret.strip() == "^"


@pytest.mark.parametrize("text", ["s = softmax(dot)", "s = dot * xyz", "drop k", "s = dot @ q"])
def test_nothing_is_guessed_where_nothing_is_near(text: str) -> None:
    with pytest.raises(ProgramError) as caught:
        parse(text)
    assert "did you mean" not in str(caught.value)


def test_the_caret_stands_below_the_word_also_behind_tabs() -> None:
    with pytest.raises(ProgramError, match="line 2, column 5") as caught:
        parse("s = dot\n\ts =\t; keep")
    assert str(caught.value).endswith("\n  \ts =\t; keep\n  \t   ^")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("s = p", "p"),
        ("keep p > 0", "p"),
        ("sink p", "p"),
        ("sink dot", "dot"),
        ("sink s", "s"),
        ("sink k", "k"),
        ("sink r0[k]", "k"),
        ("sink r0[b, h + k]", "k"),
        ("p = s", "s"),
        ("p = p * where(s > 0, 1, 0)", "s"),
    ],
)
def test_a_name_is_refused_where_it_has_no_meaning(text: str, name: str) -> None:
    with pytest.raises(ProgramError, match=f"`{name}` has no meaning") as caught:
        parse(text)
    _, line, caret = str(caught.value).splitlines()
    assert line[len(caret) - 1 :].startswith(name)


@pytest.mark.parametrize("text", ["p = p\ns = dot", "p = p\nkeep k <= q", "p = p\nsink 1.0"])
def test_scores_masks_and_sinks_stand_before_weights(text: str) -> None:
    with pytest.raises(ProgramError, match=r"line 2, column 1: .* stands after `p = \.\.\.`") as caught:
        parse(text)
    assert str(caught.value).endswith(f"\n  {text.splitlines()[1]}\n  ^")


def test_a_second_sink_is_refused_not_ignored() -> None:
    with pytest.raises(ProgramError, match=r"line 1, column 11: `sink 2.0` is a second sink"):
        parse("sink 1.0; sink 2.0")


def test_binders_and_reads_of_graph_nodes_are_not_part_of_the_language() -> None:
    variable = E.var("i", E.const(3))
    for value in (E.make("sum", (variable, variable), None, "int"), E.read("node", (S.index("k"),))):
        with pytest.raises(ProgramError):
            ScoreProgram((Score(value),))


@pytest.mark.parametrize("text", ["s = " + "(" * 3000 + "1" + ")" * 3000, "s = " + "+".join(["1"] * 3000)])
def test_very_deep_text_is_parsed_or_refused_in_our_own_words(text: str) -> None:
    try:
        program = parse(text)
        assert parse(str(program)) == program
    except ProgramError:
        pass


def test_reads_and_sizes_are_counted_from_every_statement() -> None:
    program = parse("s = dot + r3[h]\nkeep r1[b, k] and k < n2 else r0[]\nsink r5[h]\np = p * r2[q, r4[k]]")
    assert program.reads == {3: 1, 1: 2, 0: 0, 5: 1, 2: 2, 4: 1}
    assert program.sizes == 3


@pytest.mark.parametrize(
    ("text", "scale"),
    [
        ("", 1.0),
        ("keep k <= q", 1.0),
        ("s = 0.5 * dot", 0.5),
        ("s = dot * 0.5", 0.5),
        ("s = dot / 4", 0.25),
        ("s = 4 / dot", None),
        ("s = dot + 1", None),
        ("s = 2 * dot\ns = s * 2", None),
        ("s = 2 * dot\nkeep dot > 0", None),
        ("keep k <= q\ns = 2 * dot", None),
        ("s = dot * dot", None),
        ("s = 2 * dot\nkeep k <= q else s - 5", 2.0),
        ("s = dot / 0", None),
    ],
)
def test_scale_is_the_factor_only_where_nothing_else_happens_to_the_dot(
    text: str, scale: float | None
) -> None:
    assert parse(text).scale == scale


def test_statement_classes_are_exported_as_values() -> None:
    assert parse("sink 1.0") == ScoreProgram((Sink(E.const(1.0)),))
    assert parse("p = p") == ScoreProgram((Weight(S.WEIGHT),))

"""Final answers: what is found in a text, and what counts as the reference."""

from fractions import Fraction

import pytest

from stages.score import extract
from stages.score.exact import in_prose, number

R = Fraction


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", R(42)),
        ("-7", R(-7)),
        ("−7", R(-7)),
        ("+3", R(3)),
        ("1,234", R(1234)),
        ("58{,}500", R(58500)),
        (r"58\,500", R(58500)),
        ("1,234,567.80", R(123456780, 100)),
        ("$1,234.50", R(2469, 2)),
        ("-$5", R(-5)),
        (r"\$18", R(18)),
        ("€ 20", R(20)),
        ("2.500", R(5, 2)),
        (".5", R(1, 2)),
        ("3/4", R(3, 4)),
        ("1 1/2", R(3, 2)),
        (r"\frac{3}{4}", R(3, 4)),
        (r"-\dfrac{3}{4}", R(-3, 4)),
        (r"\tfrac34", R(3, 4)),
        (r"1\frac{1}{2}", R(3, 2)),
        ("50%", R(50)),
        (r"12.5\%", R(25, 2)),
        ("50 percent", R(50)),
        ("12 apples", R(12)),
        ("5 km/h", R(5)),
        ("9 m^2", R(9)),
        ("3 hours.", R(3)),
        (r"5\text{ cm}", R(5)),
        (r"90^\circ", R(90)),
        ("90°", R(90)),
        ("3 million", R(3_000_000)),
        ("2 dozen eggs", R(24)),
        ("1e3", R(1000)),
        (r"2.5 \times 10^{-3}", R(25, 10000)),
        ("x = 5", R(5)),
        ("3 + 4 = 7", R(7)),
        ("**42**", R(42)),
        (r"\(42\)", R(42)),
        ("$42$.", R(42)),
    ],
)
def test_a_number_is_read_exactly(text, value):
    found = number(text)
    assert found is not None
    assert found.value == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "3x",
        "3 x",
        "1, 2",
        "(1, 2)",
        "3 and 4",
        "1/0",
        "1/2/3",
        "2:30",
        r"\sqrt{2}",
        "3 hours 20 minutes",
        "1234,567",
    ],
)
def test_anything_else_is_no_number(text):
    assert number(text) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("10 - 3 and 10-3 and 10 -3", ["10", "3", "10", "3", "10", "3"]),
        ("it is -3, (-4) = -5", ["-3", "-4", "-5"]),
        ("the 2nd and the 42nd of 7", ["7"]),
        ("H2O, x2 and 5km", ["5"]),
        ("$1,200 and 3.5. Then 40%.", ["1,200", "3.5", "40%"]),
        (r"so \frac{1}{2} or 3/4", ["1/2", "3/4"]),
    ],
)
def test_numbers_of_a_text(text, found):
    assert list(in_prose(text)) == found


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"We get \boxed{42}.", "42"),
        (r"First \boxed{1}, then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\frac{\sqrt{3}}{2}} and 7", r"\frac{\sqrt{3}}{2}"),
        (r"\fbox{3} 9", "3"),
        (r"so \boxed 2 and 5", "2"),
        (r"\boxed{a \} b} 5", r"a \} b"),
        (r"\boxed{7} or \boxed{8", "7"),
        (r"\boxed{} The answer is 4", "4"),
        ("17 * 2 = 34\n#### 34", "34"),
        ("#### 1\nno, again:\n#### -5 apples", "-5 apples"),
        ("#### Step 3: Add\n4 + 5 = 9", "9"),
        ("The answer is 42 because 40 + 3 = 43.", "42"),
        ("The final answer to this is: **42**.\nCheck: 1 + 2", "42"),
        ("Answer:\n7", "7"),
        ("The answer is 4 + 5 = 9.", "9"),
        ("The answer is the sum of 3 and 4, which is 7.", "7"),
        ("the answer is x = -2", "-2"),
        ("The answer is Paris.", "Paris"),
        ("4 pens, 3 dollars each: 4 * 3 = $12. That is 12 dollars.", "12"),
        ("No numbers at all", None),
        ("", None),
    ],
)
def test_the_answer_of_a_text(text, answer):
    assert extract.final_answer(text, whole=True) == answer


def test_a_cut_text_has_an_answer_only_where_it_states_one():
    assert extract.final_answer("4 * 3 = 12, and then 12 - ", whole=False) is None
    assert extract.final_answer(r"\boxed{12} and then", whole=False) == "12"
    assert extract.final_answer("#### 12\nMore", whole=False) == "12"
    assert extract.final_answer("The answer is 12. To check", whole=False) == "12"


RIGHT = [
    ("1,000", "1000"),
    ("1000.00", "1000"),
    ("$5", "5"),
    ("0.5", "1/2"),
    (r"\frac{2}{4}", "0.5"),
    ("50%", "50"),
    ("50%", "0.5"),
    ("25%", r"\frac14"),
    ("12 apples", "12"),
    ("Paris", " paris."),
    (r"\frac{\sqrt{12}}{2}", r"\sqrt{3}"),
    ("2x+x", "3x"),
    ("(1,2)", "(1, 2)"),
    (r"\{1,2\}", r"\{2,1\}"),
]
WRONG = [
    ("1/2", "1/3"),
    (r"\frac{1}{2}", r"\frac{1}{3}"),
    ("0.333", "1/3"),
    ("50", "0.5"),
    ("1000001", "1000002"),
    ("10000000000000000001", "10000000000000000000"),
    ("3 million", "3"),
    ("-5", "5"),
    ("(1,2)", "(2,1)"),
    ("1, 2", "12"),
    ("Paris", "Rome"),
    ("3 and 4", "4"),
    (r"\frac{1}{", "1"),
    ("x", "5"),
]


@pytest.mark.parametrize(("answer", "reference"), RIGHT)
def test_right(answer, reference):
    assert extract.is_right(answer, reference)


@pytest.mark.parametrize(("answer", "reference"), WRONG)
def test_wrong(answer, reference):
    assert not extract.is_right(answer, reference)


def test_equal_numbers_have_one_spelling():
    assert len({extract.canonical(text) for text in ("0.50", "1/2", r"\frac{2}{4}", " .5 ")}) == 1
    assert extract.canonical("1,000 dollars") == extract.canonical("$1000.0") == "1000"
    assert extract.canonical("The  Cat.") == "the cat"

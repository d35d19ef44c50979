import json

import pytest

from uncollapse.report.markup import Markup, breakable, data_script, element

HOSTILE = "</script><img src=x onerror=alert(1)>\"'&\u2028"


def test_text_and_attributes_are_escaped() -> None:
    made = element("p", HOSTILE, title=HOSTILE)
    assert "<img" not in made
    assert made.count("<") == 2
    assert 'title="&lt;/script&gt;' in made


def test_markup_goes_in_as_it_is_and_nothing_is_left_out() -> None:
    inner = element("b", "x")
    assert element("p", inner, None, [inner, "&"], hidden=True, id=None) == "<p hidden><b>x</b><b>x</b>&amp;</p>"
    assert isinstance(inner, Markup)


def test_json_cannot_end_its_script_and_reads_back() -> None:
    made = data_script("d", {"name": HOSTILE})
    inside = made.partition(">")[2].rpartition("</script>")[0]
    assert not set("<>&\u2028") & set(inside)
    assert json.loads(inside) == {"name": HOSTILE}


def test_numbers_that_json_does_not_have_are_an_error() -> None:
    with pytest.raises(ValueError, match="JSON"):
        data_script("d", {"x": float("nan")})


def test_long_names_break_after_dots_and_stay_escaped() -> None:
    assert breakable("a.b_<i>") == "a.<wbr>b_<wbr>&lt;i&gt;"

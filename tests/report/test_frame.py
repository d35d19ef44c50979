"""The frame of all pages: what templates get is escaped, JSON stays inside its script, and the policy is strict."""

import json
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from uncollapse.report import frame

HOSTILE = "</script><img src=x onerror=alert(1)>\"'&\u2028"


def render(**context: object) -> str:
    given: dict[str, object] = {
        "title": "x",
        "subtitle": "x",
        "subject": "x",
        "links": {},
        "legend": "",
        "groups": [],
        "plots": [],
    }
    details = {"title": HOSTILE, "note": HOSTILE, "head": [HOSTILE], "rows": [[HOSTILE]], "words": 1}
    given |= {"corner": "", "columns": "", "notes": [], "details": [details]}
    return frame.render("table.html", **{**given, **context})


def test_every_template_escapes_text_and_attributes() -> None:
    text = render(title=HOSTILE, subtitle=HOSTILE, subject=HOSTILE, links={HOSTILE: HOSTILE}, notes=[HOSTILE])
    assert "<img" not in text
    assert 'href="#&lt;/script&gt;' in text
    environment = frame._environment()
    assert environment.autoescape is True
    assert len(environment.list_templates()) == len(list((files("uncollapse.report") / "templates").iterdir()))
    for name in environment.list_templates():
        source = (files("uncollapse.report") / "templates" / name).read_text(encoding="utf-8")
        assert "safe" not in source, "only frame.py marks text as HTML"
        assert "autoescape" not in source


def test_a_value_that_the_template_lacks_is_an_error() -> None:
    with pytest.raises(Exception, match="subtitle"):
        frame.render("table.html", title="x", subject="x", links={})


def test_json_cannot_end_its_script_and_reads_back() -> None:
    text = frame.json_for_script({"name": HOSTILE})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"name": HOSTILE}
    with pytest.raises(ValueError, match="JSON"):
        frame.json_for_script({"x": float("nan")})


def test_the_policy_allows_scripts_by_their_hash() -> None:
    script = frame.read_asset("table.js")
    policy = frame.content_security_policy([script])
    assert f"script-src {frame.script_hash(script)};" in policy
    assert "script-src 'none';" in frame.content_security_policy([])
    assert "unsafe-inline" not in policy.replace("style-src 'unsafe-inline'", "")
    assert "unsafe-eval" not in policy


def test_without_jinja_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    frame._environment.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"uncollapse\[report\]"):
        render()


def test_lone_surrogates_are_written(tmp_path: Path) -> None:
    assert frame.write_html("bad \udc80 name", tmp_path / "x.html").read_text(encoding="utf-8") == "bad ? name"

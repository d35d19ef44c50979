"""HTML made of elements. Text is escaped on its way in, so that a name from a model can never become markup."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable
from typing import Any

VOID = {"input", "meta", "path", "circle", "br"}


class Markup(str):
    """A piece of HTML that goes into a page as it is."""

    __slots__ = ()


Child = Markup | str | None | Iterable["Child"]


def element(name: str, /, *children: Child, **attributes: str | bool | None) -> Markup:
    """An element. `class_` is class, `aria_label` is aria-label; an attribute that is None or False is left out.

    >>> element("p", "1 < 2", class_="note")
    '<p class="note">1 &lt; 2</p>'
    """
    given = "".join(_attribute(key, value) for key, value in attributes.items() if value not in (None, False))
    if name in VOID:
        return Markup(f"<{name}{given}>" if name not in ("path", "circle") else f"<{name}{given}/>")
    return Markup(f"<{name}{given}>{join(children)}</{name}>")


def join(children: Child) -> Markup:
    """Several pieces one after the other; plain strings are escaped."""
    if children is None:
        return Markup("")
    if isinstance(children, Markup):
        return children
    if isinstance(children, str):
        return Markup(html.escape(children))
    return Markup("".join(join(child) for child in children))


def breakable(name: str) -> Markup:
    """A long dotted name that may go on in the next line after a dot, a slash or an underscore."""
    return Markup("".join(part + "<wbr>" * (part in "./_") for part in re.split(r"([./_])", html.escape(name)) if part))


def data_script(identity: str, value: Any) -> Markup:
    """JSON that a script can read and that cannot end its element, whatever strings are in it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII only: no U+2028 either
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(f'<script type="application/json" id="{identity}">{text}</script>')


def fingerprint(source: str) -> str:
    """How a content security policy names an inline script."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() + "'"


def _attribute(key: str, value: str | bool | None) -> str:
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(str(value))}"'

"""Strings of a pattern or a format, as they are written in JSON."""

import re

from jaxinfer.errors import InvalidOption
from jaxinfer.grammar.schema.pieces import CHARACTER, UNSAFE, escaped

# Patterns are ECMAScript's. What it means by a class and what readers with Unicode mean differ, so a class is narrow
# where it lets in and wide where it keeps out. What JSON writes with an escape is in no class.
_NARROW = {"d": "0-9", "w": "A-Za-z0-9_", "s": " ", "D": r"\D", "W": r"\W", "S": r"\S"}
_WIDE = {"d": r"\d", "w": r"\w", "s": r"\s", "D": "[^0-9]", "W": "[^A-Za-z0-9_]", "S": "[^ ]"}
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
_WRITTEN = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\f": "\\f", "\b": "\\b"}
_TIMES = re.compile(r"\{\d+(?:,\d*)?\}")
_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})")
_CATEGORY = re.compile(r"[pP]\{[A-Za-z_]+\}")

_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"[0-9]{{3}}[1-9]-{_DAY}"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_SECONDS, _DAYS = "[0-9]{1,4}S", "[0-9]{1,4}D"
_MINUTES, _MONTHS = f"[0-9]{{1,4}}M(?:{_SECONDS})?", f"[0-9]{{1,4}}M(?:{_DAYS})?"
_HOURS, _YEARS = f"[0-9]{{1,4}}H(?:{_MINUTES})?", f"[0-9]{{1,4}}Y(?:{_MONTHS})?"
_CLOCK = f"T(?:{_HOURS}|{_MINUTES}|{_SECONDS})"
_GROUP = "[0-9a-f]{1,4}"
# Two colons stand for groups that are not there.
_SHORTENED = "|".join(f"(?:{_GROUP}:){{1,{before}}}(?::{_GROUP}){{1,{7 - before}}}" for before in range(1, 7))
_BYTE = "(?:[0-9]|[1-9][0-9]|1[0-9]{2}|2[0-4][0-9]|25[0-5])"
_LABEL = "[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{1,4}}"
# Each has some texts of its format, not all: no 29th of February, say.
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:(?:{_YEARS}|{_MONTHS}|{_DAYS})(?:{_CLOCK})?|{_CLOCK}|[0-9]{{1,4}}W)",
    "uuid": "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": f"(?:(?:{_GROUP}:){{7}}{_GROUP}|{_SHORTENED}|(?:{_GROUP}:){{1,7}}:|:(?:(?::{_GROUP}){{1,7}}|:))",
    "hostname": _HOST,
    "email": rf"[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+)*@{_HOST}",
    "uri": rf"https?://{_HOST}(?:/[A-Za-z0-9._~-]*)*(?:\?[A-Za-z0-9._~=&-]*)?",
}


def matching(pattern: str) -> str:
    """Return the strings in which a pattern is found; raise InvalidOption for what cannot be said."""
    reader = _Pattern(pattern)
    start, end = ("" if is_there else f"{CHARACTER}*" for is_there in reader.anchors)
    return f'"{start}(?:{reader.read()}){end}"'


class _Pattern:
    """Reads a pattern once, from its beginning to its end."""

    def __init__(self, pattern: str) -> None:
        backslashes = len(pattern) - 1 - len(pattern[:-1].rstrip("\\")) if pattern.endswith("$") else 1
        self.anchors = pattern.startswith("^"), backslashes % 2 == 0
        self._text = pattern[self.anchors[0] : len(pattern) - self.anchors[1]]
        self._place = 0

    def read(self) -> str:
        """Return the expression between the anchors."""
        parts, depth = [], 0
        while self._place < len(self._text):
            character = self._next()
            if character == "(":
                self._open_group()
                parts.append("(?:")
                depth += 1
            elif character == ")":
                depth -= 1
                if depth < 0:
                    raise _wrong("a group is closed that is not open")
                parts.append(")")
            elif character == "|" and depth == 0 and any(self.anchors):
                raise _wrong("an anchor holds for one side of |: put a group around the alternatives")
            else:
                parts.append(self._one(character))
        if depth:
            raise _wrong("a group is not closed")
        return "".join(parts)

    def _next(self) -> str:
        if self._place == len(self._text):
            raise _wrong("it ends too early")
        self._place += 1
        return self._text[self._place - 1]

    def _take(self, form: re.Pattern[str]) -> re.Match[str] | None:
        found = form.match(self._text, self._place)
        self._place = found.end() if found else self._place
        return found

    def _open_group(self) -> None:
        if self._text[self._place : self._place + 1] == "?":
            if self._text[self._place : self._place + 2] != "?:":
                raise _wrong("groups that look around, have names or change flags are not implemented")
            self._place += 2

    def _one(self, character: str) -> str:
        if character in "|*+?":
            return character
        if character in "^$":
            raise _wrong("anchors are implemented at the beginning and the end alone")
        if character == ".":
            return rf"[^{UNSAFE}\x{{2028}}\x{{2029}}]"
        if character == "[":
            return self._class()
        if character == "{":
            self._place -= 1
            found = self._take(_TIMES)
            if found is None:
                raise _wrong("{ is no number of times: write \\{")
            return found[0]
        return self._escape() if character == "\\" else _character(character)

    def _escape(self) -> str:
        if found := self._take(_CATEGORY):
            return f"[\\{found[0]}&&[^{UNSAFE}]]"
        character = self._next()
        if character in _NARROW:
            return f"[[{_NARROW[character]}]&&[^{UNSAFE}]]"
        return _character(self._meant(character))

    def _meant(self, character: str) -> str:
        """Return the character that an escape stands for."""
        if character in _ESCAPES:
            return _ESCAPES[character]
        if character in "xu":
            self._place -= 1
            found = self._take(_CODE)
            if found is not None:
                return chr(int(found[1] or found[2], 16))
        if character.isalnum():
            raise _wrong(f"\\{character} is not implemented")
        return character

    def _class(self) -> str:
        """Return a class without what JSON writes with an escape."""
        is_negated = self._text[self._place : self._place + 1] == "^"
        self._place += is_negated
        classes, items = _WIDE if is_negated else _NARROW, []
        while (character := self._next()) != "]":
            item, is_class = self._item(character, classes)
            is_range = self._text[self._place : self._place + 1] == "-" and self._text[self._place + 1 :][:1] != "]"
            if is_range:
                self._place += 1
                last, is_class_too = self._item(self._next(), classes)
                if is_class or is_class_too:
                    raise _wrong("a class is no end of a range")
                item = f"{item}-{last}"
            items.append(item)
        if not items:
            raise _wrong("a class is empty")
        return f"[[{'^' if is_negated else ''}{''.join(items)}]&&[^{UNSAFE}]]"

    def _item(self, character: str, classes: dict[str, str]) -> tuple[str, bool]:
        if character == "\\":
            if found := self._take(_CATEGORY):
                return f"\\{found[0]}", True
            character = self._next()
            if character in classes:
                return classes[character], True
            character = "\b" if character == "b" else self._meant(character)
        return f"\\x{{{_code(character):X}}}", False


def _character(character: str) -> str:
    """Return how a string has a character."""
    written = _WRITTEN.get(character, character)
    if written == character and (_code(character) < 0x20 or 0x7F <= _code(character) < 0xA0):
        raise _wrong(f"the character {_code(character)} is not written")
    return escaped(written) if len(written) == 1 else f"(?:{escaped(written)})"


def _code(character: str) -> int:
    code = ord(character)
    if 0xD800 <= code < 0xE000:
        raise _wrong("half a pair of surrogates is no character")
    return code


def _wrong(reason: str) -> InvalidOption:
    return InvalidOption(reason)

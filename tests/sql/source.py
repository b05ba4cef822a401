"""What the files of sql/ say about themselves: functions, their headers, and what their bodies really touch."""

import re
from dataclasses import dataclass, field

from pyclient import files

DEFINITION = re.compile(
    r"(?P<header>(?:^--[^\n]*\n)*)^create or replace (?:function|procedure) almanac\.(?P<name>\w+)\s*(?P<rest>\(.*?)"
    r"(?=^create |^comment on |^revoke |^grant |\Z)",
    re.MULTILINE | re.DOTALL,
)
WRITE = r"\b(?:insert\s+into|update(?:\s+only)?|delete\s+from(?:\s+only)?|merge\s+into|truncate(?:\s+table)?)\s+"
READ = r"(?:\b(?:from|join|using)|,)\s+(?:only\s+|lateral\s+)*"


@dataclass
class Touched:
    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)
    calls: set[str] = field(default_factory=set)


@dataclass
class Function:
    file: str
    number: int
    name: str
    header: str
    text: str

    @property
    def code(self) -> str:
        """The definition without comments and without the contents of string literals."""
        return without_strings(without_comments(self.text))

    @property
    def strings(self) -> str:
        return " ".join(re.findall(r"'((?:[^']|'')*)'", without_comments(self.text)))

    def declared(self) -> Touched:
        """Reads/Writes/Calls of the header."""
        prose = " ".join(line.removeprefix("--").strip() for line in self.header.splitlines())
        found = {
            kind: {name.strip() for name in names.split(",") if name.strip()}
            for kind, names in re.findall(r"\b(Reads|Writes|Calls):\s*([^.]*)\.", prose)
        }
        return Touched(found.get("Reads", set()), found.get("Writes", set()), found.get("Calls", set()))

    def actual(self, relations: set[str], functions: set[str]) -> Touched:
        code = self.code
        touched = Touched()
        written = list(re.finditer(WRITE + r"almanac\.(\w+)", code))
        touched.writes = {match.group(1) for match in written}
        targets = {match.start(1) for match in written}
        for match in re.finditer(r"almanac\.(\w+)(\s*\()?", code):
            name, called = match.group(1), match.group(2) is not None
            if match.start(1) in targets:
                continue
            before = code[: match.start()]
            if called and name in functions:
                touched.calls.add(name)
            elif name in relations and re.search(READ + r"\Z", before):
                touched.reads.add(name)
        touched.calls.discard(self.name)
        return touched


def without_comments(text: str) -> str:
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)
    return re.sub(r"--[^\n]*", "", text)


def without_strings(text: str) -> str:
    return re.sub(r"'(?:[^']|'')*'", "''", text)


def functions() -> list[Function]:
    return [
        Function(file.name, file.number, match["name"], match["header"], match["rest"])
        for file in files.sql_files()
        for match in DEFINITION.finditer(file.text())
    ]

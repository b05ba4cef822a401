"""The lowest version of every dependency that pyproject.toml allows, as constraints for pip: `make test-lowest`."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text())["project"]


def constraints() -> Iterator[str]:
    """Of what users install; tools of developers are whatever is newest."""
    extras = PROJECT["optional-dependencies"]
    for requirement in [*PROJECT["dependencies"], *(one for name in extras if name != "dev" for one in extras[name])]:
        bounded = re.match(r"([\w-]+)(?:\[.*?\])?>=([\d.]+)", requirement)
        if bounded:
            yield f"{bounded[1]}=={bounded[2]}"
        elif not requirement.startswith(f"{PROJECT['name']}["):
            raise SystemExit(f"{requirement} has no lower bound")


if __name__ == "__main__":
    print("\n".join(constraints()))

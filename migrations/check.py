"""squawk on the SQL of every revision, wherever it stands: in a string of the revision or in a file beside it."""

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

from pyclient import files


def sql_of(revision: Path) -> str:
    """What the revision sends, recorded instead of sent."""
    sent: list[str] = []
    spec = importlib.util.spec_from_file_location(revision.stem, revision)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.run_sql = sent.append  # type: ignore[attr-defined]
    module.upgrade()
    return "\n".join(sent)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        for revision in sorted((files.folder("migrations") / "versions").glob("[0-9]*.py")):
            Path(scratch, revision.with_suffix(".sql").name).write_text(sql_of(revision), encoding="utf-8")
        config = files.folder("migrations").parent / ".squawk.toml"
        squawk = Path(sys.executable).parent / "squawk"
        checked = sorted(Path(scratch).glob("*.sql"))
        sys.exit(subprocess.run([squawk, "--config", config, *checked], check=False).returncode)

"""Finds faults that would break a fresh clone: tracked links, tracked but ignored files, and a wrong package name.

PyPI's `warmpath` is another project; ours is `warmpath-serve`. Also finds a public name that two classes or aliases
of types share: a name says which one is meant. `make lint` runs this in the root of the checkout.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

INSTALLS = re.compile(r"""pip3? install[^`&|;\n]*[\s"']warmpath(?!-serve)(?=[\s"'`\[=<>~]|$)""")
PACKAGES = ("router/", "serve_app/", "benchmarks/", "cluster/")


def public_types(source: str) -> list[tuple[str, int]]:
    """Return the name and the line of each public class, nested ones too, and of each module's own alias of a type."""
    tree = ast.parse(source)
    names = [(node.name, node.lineno) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    aliases = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    names += [(alias.id, alias.lineno) for alias in aliases if isinstance(alias, ast.Name) and not alias.id.isupper()]
    return [(name, line) for name, line in names if name[0].isupper()]


def problems(root: Path) -> list[str]:
    """Return a sentence for each fault of the checkout at ``root``."""

    def git(*arguments: str) -> list[str]:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
        return [line for line in done.stdout.split("\0") if line]

    staged = [line.split(maxsplit=3) for line in git("ls-files", "-sz")]
    links = [path for mode, _, _, path in staged if mode == "120000"]
    ignored = git("ls-files", "-ciz", "--exclude-standard")
    wrong = [f"{path}: a tracked link leads nowhere in another clone; remove it from git" for path in links]
    wrong += [f"{path}: tracked, though .gitignore names it; remove it from git" for path in ignored]
    classes: dict[str, str] = {}
    for _, _, _, path in staged:
        file = root / path
        if path in links or not file.is_file():
            continue
        try:
            text = file.read_text()
        except UnicodeDecodeError:
            continue
        if path.endswith(".py") and path.startswith(PACKAGES):
            for name, line in public_types(text):
                if (first := classes.setdefault(name, f"{path}:{line}")) != f"{path}:{line}":
                    wrong.append(f"{path}:{line}: {first} has a type {name}, too; give one of them another name")
        wrong += [
            f"{path}:{number}: PyPI's warmpath is another project; write pip install . or '.[EXTRA]'"
            for number, line in enumerate(text.splitlines(), 1)
            if INSTALLS.search(line)
        ]
    return wrong


if __name__ == "__main__":
    wrong = problems(Path.cwd())
    print("\n".join(wrong), file=sys.stderr)
    sys.exit(bool(wrong))

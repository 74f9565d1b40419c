"""Prints every name that a Python module reads and nothing defines: python names.py FILE ..."""

import ast
import builtins
import sys


def defined(tree):
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                yield alias.asname or alias.name.split(".")[0]


def main():
    missing = []
    for path in sys.argv[1:]:
        with open(path, encoding="utf-8") as file:
            tree = ast.parse(file.read(), path)
        known = set(defined(tree)) | set(dir(builtins)) | {"__doc__", "__name__"}
        read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        missing += [f"{path}: {name}" for name in sorted(read - known)]
    print("\n".join(missing))
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()

#!/usr/bin/env bash
# Builds the wheel, installs it in an empty virtual environment, and compares README's lines of Python with the output that it
# shows. With torch and transformers in python3, also compares models under plans with one process.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=target/python/tools empty=target/python/empty wheels=target/python/wheels
rm -rf "$empty" "$wheels"
[ -x "$tools/bin/maturin" ] || python3 -m venv "$tools"
"$tools/bin/pip" install --quiet --disable-pip-version-check "maturin>=1.9,<2"
# The profile of the tests, whose crates are built.
"$tools/bin/maturin" build --quiet --profile dev --interpreter python3 --out "$wheels"
python3 -m venv "$empty"
"$empty/bin/pip" install --quiet --disable-pip-version-check --no-index "$wheels"/ithaca-*.whl

section="$(sed -n '/^## From Python/,/^## /p' README.md)"
lines="$(sed -n '/^```python/,/^```/{//!p}' <<<"$section" | sed '/^plan.save/q')"
shown="$(sed -n '/^```text/,/^```/{//!p}' <<<"$section")"
printed="$("$empty/bin/python" - <<<"${lines//plan.json/$empty/plan.json}")"
if ! diff <(echo "$shown") <(echo "$printed"); then
    echo "README's lines of Python print something else than README shows"
    exit 1
fi
echo "README's lines of Python print what it shows"

"$empty/bin/pip" install --quiet --disable-pip-version-check pytest || { echo "no pytest: not tested further"; exit 0; }
"$empty/bin/python" -m pytest -q -p no:cacheprovider python/tests/test_plan.py
if python3 -c "import torch, transformers, accelerate, safetensors" 2>/dev/null; then
    python3 -c "import site; print(site.getsitepackages()[0])" >"$("$empty/bin/python" -c "import site; print(site.getsitepackages()[0])")/torch.pth"
    "$empty/bin/python" -m pytest -q -p no:cacheprovider python/tests
else
    echo "no torch: ithaca.parallelize is not tested"
fi

#!/usr/bin/env bash
# Installs ithaca with cargo: the version ITHACA_VERSION of crates.io, or the source at ITHACA_PATH. Where that is installed
# already, as from a cache, nothing is built.
set -euo pipefail

if [ -n "${ITHACA_VERSION:-}" ]; then
    cargo install --locked ithaca --version "$ITHACA_VERSION"
elif [ -n "${ITHACA_PATH:-}" ]; then
    cargo install --locked --path "$ITHACA_PATH"
else
    echo "set ITHACA_VERSION or ITHACA_PATH" >&2
    exit 2
fi

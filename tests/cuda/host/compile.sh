#!/usr/bin/env bash
# A C++ compiler that compiles nothing twice: tests/cuda/host/compile.sh ARGUMENTS…
#
# It takes the arguments of g++, `-o FILE` among them. The result of a compilation is kept under ITHACA_COMPILED (target/compiled
# by default) by a hash of the compiler, the options and the preprocessed source; who asks for the same again, in this process
# or in another, gets a copy. CXX names the compiler.
set -euo pipefail

compiler=${CXX:-g++}
kept=${ITHACA_COMPILED:-$(cd "$(dirname "$0")/../../.." && pwd)/target/compiled}
output=
options=()     # that make a difference beside the text
sources=()     # the rest
while [ $# -gt 0 ]; do
    case $1 in
        -o) output=$2; shift 2 ;;
        -I|-isystem) sources+=("$1" "$2"); shift 2 ;;
        -x) options+=("$1" "$2"); sources+=("$1" "$2"); shift 2 ;;
        -*) options+=("$1"); sources+=("$1"); shift ;;
        *) sources+=("$1"); last=$1; shift ;;
    esac
done
[ -n "$output" ] || exec "$compiler" "${sources[@]}"
command -v flock >/dev/null || exec "$compiler" -o "$output" "${sources[@]}"

mkdir -p "$kept"
# Where the program lies shows in messages of failures, and makes no difference to what it does.
at=$(dirname "$last")
hash=$({
    "$compiler" --version | head -n 1
    printf '%s\n' "${options[@]}"
    "$compiler" -E -P "${sources[@]}" | sed "s|$at||g"
} | sha256sum)
file=$kept/${hash%% *}
exec 9>"$file.lock"
flock 9
if [ ! -e "$file" ]; then
    "$compiler" -o "$file.new" "${sources[@]}"
    mv "$file.new" "$file"
fi
cp "$file" "$output"

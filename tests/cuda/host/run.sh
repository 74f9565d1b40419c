#!/usr/bin/env bash
# Runs an emitted program without a GPU: tests/cuda/host/run.sh DIR NRANKS ARGS…
#
# DIR is what `ithaca emit --target cuda` wrote. The very same sources are compiled with a host compiler against the
# headers beside this script, and NRANKS processes are started with the environment that torchrun would give them.
# The exit status is that of the rank that failed first. CXX and CXXFLAGS are honoured.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: $0 DIR NRANKS [ARGS…]" >&2
    exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
directory=$1
ranks=$2
shift 2

program=$directory/program-host
if [ ! -x "$program" ] || [ -n "$(find "$directory" "$here" -newer "$program" \( -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.hpp' \) -print -quit)" ]; then
    objects=()
    for source in "$directory"/main.cu "$directory"/runtime/*.c{pp,u}; do
        [ -e "$source" ] || continue
        objects+=("$program.${#objects[@]}.$$.o")
        "$here/compile.sh" -std=c++17 -Og -Wall -Wextra -Werror ${CXXFLAGS:-} -x c++ -isystem "$here" -I "$directory" \
            -c -o "${objects[-1]}" "$source"
    done
    "${CXX:-g++}" ${CXXFLAGS:-} -o "$program.new.$$" "${objects[@]}"
    rm "${objects[@]}"
    mv "$program.new.$$" "$program"
fi

meeting=$(mktemp -d)
trap 'rm -rf "$meeting"' EXIT
pids=()
for ((rank = 0; rank < ranks; rank++)); do
    RANK=$rank WORLD_SIZE=$ranks LOCAL_RANK=$rank NCCL_COMM_ID=$meeting \
        "$program" "$@" &
    pids+=($!)
done
status=0
failed() {
    # The ranks that are left would wait for the one that ended.
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
}
for ((i = 0; i < ranks; i++)); do
    one=0
    wait -n || one=$?
    if [ "$one" -ne 0 ]; then
        # The status of the first failure is the cause; the others were ended.
        [ "$status" -ne 0 ] || status=$one
        failed
    fi
done
exit "$status"

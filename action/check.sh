#!/usr/bin/env bash
# Plans everything in a file of models, clusters and workloads, and writes the review to the job summary: action/check.sh [FILE]
#
# ITHACA is the program (default: ithaca), GITHUB_STEP_SUMMARY the file of the summary (default: none). The exit code is that of
# `ithaca check`: 0 without a difference, 1 with one, 2 after an error.
set -uo pipefail

file=${1:-ithaca.toml}
output=$("${ITHACA:-ithaca}" check "$file" 2>&1)
code=$?
printf '%s\n' "$output"
case $code in
    0) title="Plans are as committed" ;;
    1) title="Plans differ from those committed" ;;
    *) title="Plans could not be checked" ;;
esac
if [ -n "${GITHUB_STEP_SUMMARY:-}" ]; then
    # Output has backticks, never four in a row at the start of a line.
    printf '### %s\n\n````text\n%s\n````\n' "$title" "$output" >>"$GITHUB_STEP_SUMMARY"
fi
exit "$code"

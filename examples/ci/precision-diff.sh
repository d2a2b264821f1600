#!/usr/bin/env bash
# Compares files as they are about to be committed with the same files in the last commit.
#
#     precision-diff.sh FILE ...
#
# FILE: a model (.onnx) or a report of one (.json). A file that the last commit does not have is skipped.
# Exit code: 0 nothing was raised to float32 and no Cast came or went, 1 something did, 2 a file is unreadable.
# AMP_REWRITE_FAIL_ON says which differences count, instead of raised,casts.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

worst=0
for file in "$@"; do
  tracked=$(git ls-files --full-name -- "$file")
  if [ -z "$tracked" ] || ! git cat-file -e "HEAD:$tracked" 2> /dev/null; then
    echo "$file: new, nothing to compare it with"
    continue
  fi
  # --filters: where models are stored with git-lfs this is the model, not the pointer to it.
  before="$folder/$(basename "$file")"
  git cat-file --filters "HEAD:$tracked" > "$before"
  code=0
  amp-rewrite diff "$before" "$file" --fail-on "${AMP_REWRITE_FAIL_ON:-raised,casts}" || code=$?
  if [ "$code" -eq 1 ]; then
    echo "$file: precision changed (to commit it all the same: SKIP=precision-diff git commit)"
  fi
  if [ "$code" -gt "$worst" ]; then worst=$code; fi
done
exit "$worst"

#!/usr/bin/env bash
# Checks the models of a repository against a commit, for the GitHub action and the GitLab template.
#
# Environment variables: MODELS (git pathspecs), BASE (a commit), FAIL_ON, EXPECT (one expectation per line), PAGES (a
# folder for HTML pages).
# For an intended change, `amp-rewrite gate --accept --base BASE MODEL` writes MODEL.accepted.json; commit it. The
# output shows the whole command.
# Exit codes: 0 no difference in FAIL_ON, 1 a difference or a failed expectation, 2 a model or the base is unreadable.
set -euo pipefail

read -ra patterns <<< "${MODELS:-*.onnx}"
models=()
while IFS= read -r -d '' model; do models+=("$model"); done < <(git ls-files -z -- "${patterns[@]}")
if [ "${#models[@]}" -eq 0 ]; then
  echo "no tracked file matches ${MODELS:-*.onnx}"
  exit 0
fi

base="${BASE:-HEAD^}"
if [[ "$base" =~ ^0+$ ]]; then base=HEAD; fi # the first push of a branch has no previous commit
if ! git rev-parse --verify --quiet "$base^{commit}" > /dev/null; then
  git fetch --quiet --depth=1 origin "${base%^}" || true
  if [ "$base" = "HEAD^" ]; then git fetch --quiet --deepen=1 || true; fi
fi

options=(--base "$base" --fail-on "${FAIL_ON:-raised,casts}")
while IFS= read -r line; do
  if [ -n "${line// /}" ]; then options+=(--expect "$line"); fi
done <<< "${EXPECT:-}"
if [ -n "${PAGES:-}" ]; then options+=(--pages "$PAGES"); fi
if [ -n "${GITHUB_ACTIONS:-}" ]; then options+=(--format github); fi
amp-rewrite gate "${options[@]}" -- "${models[@]}"

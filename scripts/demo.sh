#!/usr/bin/env bash
# Remove a tenth of all linears' weights without training, generate with both models, benchmark both in one run.
#
# Usage: scripts/demo.sh MODEL [OUT]    MODEL: a Hugging Face folder, a GGUF file or a hub id; OUT: the compressed one
set -euo pipefail

model=${1:?usage: scripts/demo.sh MODEL [OUT]}
out=${2:-out/demo}
prompt="Explain in two sentences why the sky is blue."

run() {
    printf '\n\033[1m$ neuronmm %s\033[0m\n' "$*"
    neuronmm "$@"
}

if [ -d "$out" ]; then
    echo "$out exists: not compressing again"
else
    run compress "$model" -o "$out" --recipe "$(dirname "$0")/../configs/demo.yaml" --resume
fi
run generate "$model" --chat --prompt "$prompt" --max-new-tokens 80
run generate "$out" --chat --prompt "$prompt" --max-new-tokens 80
run benchmark "$out" --baseline "$model" --prompt-lengths 32,512 --new-tokens 32 --batch 1 --runs 3

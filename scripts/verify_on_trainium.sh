#!/usr/bin/env bash
# Verify neuronmm on a Trainium machine (trn1.2xlarge or larger; trn2 for vllm-neuron) and write one report:
# docs/trainium.md explains it.
#
#   scripts/verify_on_trainium.sh [MODEL]        on the device; MODEL: folder, GGUF file or hub id of a Llama or Qwen
#   scripts/verify_on_trainium.sh --dry-run      every step that needs no device, here, with the SDK emulated
#
# Environment variables:
#   HOST     the Neuron host: transformers-neuronx (default), nxd-inference, or vllm-neuron on a trn2. A dry run of the
#            default takes optimum-neuron in its place; one of vllm-neuron runs the plugin above stand-ins of it
#   OUT      folder for everything that is written (default out/trainium)
#   TP       cores of the second run (default 2)
#   PYTHON   makes the environment (default python3.10). A dry run uses it directly, so it needs neuronmm and
#            optimum-neuron 0.2.0 (`make test-neuron` makes one: .venv-neuron/bin/python), for nxd-inference NxD's
#            sources on PYTHONPATH (`make test-nxd`: .venv-nxd/bin/python), for vllm-neuron pytest (`make setup`:
#            .venv/bin/python)
#   NEW      new tokens per prompt (default 64)
set -uo pipefail
cd "$(dirname "$0")/.."

DRY=0
if [ "${1:-}" = "--dry-run" ]; then DRY=1; shift; fi
MODEL=${1:-meta-llama/Llama-3.2-1B}
OUT=${OUT:-out/trainium}
TP=${TP:-2}
NEW=${NEW:-64}
HOST=${HOST:-transformers-neuronx}
mkdir -p "$OUT" || exit 1
REPORT=$OUT/report.md
FAILED=0

# SDK 2.26.1 is the last with transformers-neuronx, SDK 2.29 the first with NxD Inference 0.9, SDK 2.33 has vllm-neuron
# 0.29 (published: AWS Neuron release notes and release content).
INDEX=https://pip.repos.neuron.amazonaws.com
case $HOST in
transformers-neuronx)
    PINNED=("neuronx-cc==2.21.33363.*" "torch-neuronx==2.8.*" "libneuronxla==2.2.12677.*"
            "transformers-neuronx==0.13.1315.*" "transformers==4.47.1")
    DRY_HOST=optimum-neuron DRY_PY=.venv-neuron/bin/python ;;
nxd-inference)
    PINNED=("neuronx-cc==2.24.5133.*" "torch-neuronx==2.9.*" "libneuronxla==2.2.16408.*" "nki==0.3.0"
            "neuronx-distributed==0.18.27753.*" "neuronx-distributed-inference==0.9.17334.*" "transformers==4.57.3")
    DRY_HOST=$HOST DRY_PY=.venv-nxd/bin/python ;;
vllm-neuron)
    PINNED=("vllm-neuron==0.29.0.1.2") DRY_HOST=$HOST DRY_PY=.venv/bin/python
    export NEURON_LOGICAL_NC_CONFIG=1 ;;  # the kernels run on one physical core
*) echo "error: HOST=$HOST: must be transformers-neuronx, nxd-inference or vllm-neuron" >&2; exit 2 ;;
esac

{
    echo "# neuronmm on Trainium"
    echo
    if [ $DRY = 1 ]; then echo "**A dry run: nothing below ran on a device.**"; else echo "Run on a device."; fi
    echo
    echo "$(date -u +%Y-%m-%dT%H:%MZ), commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown), $(uname -sr)"
} > "$REPORT"

# step NAME COMMAND...: run the command and write its output and its verdict into the report
step() {
    local name=$1 status; shift
    echo "== $name"
    "$@" > "$OUT/step.log" 2>&1
    status=$?
    [ $status = 0 ] || FAILED=$((FAILED + 1))
    tail -n 5 "$OUT/step.log"
    {
        echo; echo "## $name: $([ $status = 0 ] && echo passed || echo "FAILED, status $status")"
        echo; echo "    $*"; echo; echo '```'; tail -n 60 "$OUT/step.log"; echo '```'
    } >> "$REPORT"
    return $status
}

versions() {
    "$PY" -m pip list 2>/dev/null | grep -i -E "neuron|optimum|torch|transformers|numpy" || true
}

if [ $DRY = 1 ]; then
    PY=${PYTHON:-$DRY_PY}
    HOST=$DRY_HOST
    EMULATE=(--emulate)
    MODEL=${1:-$OUT/tiny}
    export TOKENIZERS_PARALLELISM=false
    NEEDS="from neuronmm.models.neuronx.sdk import choose; choose('$HOST')"
    [ "$HOST" != vllm-neuron ] || NEEDS="import neuronmm, pytest"
    step "the interpreter has what a dry run needs" "$PY" -c "$NEEDS" || exit 1
    [ -n "${1:-}" ] || step "a tiny random model" "$PY" scripts/verify_neuron.py tiny "$MODEL" || exit 1
    SIZES=(--prompt-lengths 32 --batch 1 --new-tokens 16 --runs 1)
else
    PY=$OUT/venv/bin/python
    EMULATE=()
    SIZES=(--prompt-lengths 32,512 --batch 1 --new-tokens 64 --runs 5)
    step "a Neuron device" sh -c "ls /dev/neuron* && (neuron-ls || /opt/aws/neuron/bin/neuron-ls)" || exit 1
    [ -x "$PY" ] || step "environment" "${PYTHON:-python3.10}" -m venv "$OUT/venv" || exit 1
    step "the pinned SDK" "$PY" -m pip install --quiet --extra-index-url "$INDEX" "${PINNED[@]}" || exit 1
    step "neuronmm" "$PY" -m pip install --quiet . || exit 1
fi
LOW=$OUT/low
RUN=("$PY" -m neuronmm)

step "versions" versions
step "kernel numerics" "$PY" scripts/verify_neuron.py kernels --host "$HOST" "${EMULATE[@]}"
step "compress" "${RUN[@]}" compress "$MODEL" -o "$LOW" --force --ratio 0.2 --targets all --method svd --json || exit 1
if [ "$HOST" = vllm-neuron ]; then
    if [ $DRY = 1 ]; then
        step "the plugin above stand-ins" "$PY" -m pytest -q tests/serving/test_vllm_neuron.py
    else
        for tp in 1 "$TP"; do
            for model in "$MODEL" "$LOW"; do
                step "greedy tokens of $model begin as the CPU's, $tp core(s)" \
                    "$PY" scripts/verify_neuron.py serve "$model" --tp "$tp" --new-tokens "$NEW"
            done
        done
    fi
fi
for tp in 1 "$TP"; do
    [ "$HOST" != vllm-neuron ] || break  # it is served by `vllm serve`, not by this project's engine
    step "greedy tokens equal the CPU's, $tp core(s)" \
        "$PY" scripts/verify_neuron.py generate "$MODEL" "$LOW" --host "$HOST" --tp "$tp" --new-tokens "$NEW" \
        "${EMULATE[@]}"
    [ "$DRY $HOST" != "1 nxd-inference" ] || continue  # its CPU mode has no graph whose time could be predicted
    step "benchmark, $tp core(s)" \
        "${RUN[@]}" benchmark "$LOW" --baseline "$MODEL" --backend neuron --host "$HOST" --dtype bf16 --tp "$tp" "${SIZES[@]}" \
        "${EMULATE[@]}" --output "$OUT/benchmark-tp$tp"
done

echo "== report: $REPORT, $FAILED failed"
exit $((FAILED > 0))

#!/usr/bin/env bash
# All that a machine with a GPU is wanted for, in four parts of under ten minutes:
#   bash tests/gpu/session.sh [first|tests|bench|train]...
# Each command has a time limit, and keeps its log in $OUT. The next one runs, whatever this one says. The exit code is 1
# if any has failed. PY is the Python to use.
set -uo pipefail
: "${OUT:=build/gpu}" "${PY:=python3}"
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}" MPLBACKEND=Agg
failed=()

run() { # run SECONDS NAME COMMAND...
  local limit=$1 name=$2 begin=$SECONDS code
  shift 2
  timeout --signal=INT --kill-after=10 "$limit" "$@" 2>&1 | tee "$OUT/$name.log" | tail -n 60
  code=${PIPESTATUS[0]}
  echo "== $name: exit code $code after $((SECONDS - begin)) of at most $limit s"
  [ "$code" -eq 0 ] || failed+=("$name")
}

machine() {
  nvidia-smi
  uname -a
  df -h /tmp
  getent hosts "$(hostname)"
  "$PY" -m pip list 2>/dev/null | grep -iE '^(torch|triton|lightning|numpy|pytest|transformers|nvidia-nccl)'
  true
}
export -f machine
export PY

first() { # 5 minutes: is anything else worth the time?
  run 30 machine bash -c machine
  run 60 doctor "$PY" -m lightning_odc doctor
  run 180 probe "$PY" -m tests.gpu.probe
  run 120 contract "$PY" -m pytest tests/gpu/test_contract.py -x -q -p no:cacheprovider --gpu-report "$OUT/contract.json"
}

tests() { # 9 minutes
  run 430 tests "$PY" -m pytest tests/gpu -q -p no:cacheprovider --gpu-report docs/data/gpu-tests.json
  if command -v compute-sanitizer >/dev/null; then
    run 90 memcheck compute-sanitizer --target-processes all --error-exitcode 9 "$PY" -m tests.gpu.probe
  else
    echo "== memcheck: there is no compute-sanitizer"
  fi
}

bench() { # 9 minutes
  run 530 bench "$PY" -m benchmarks.gpu --json docs/data/gpu-bench.json
}

train() { # 9 minutes
  local train=("$PY" -m benchmarks.harness --device cuda)
  run 90 nccl "${train[@]}" --ranks 1 --model 4x512 --precision bf16-mixed \
    --runs collective+local_sort --minibatches 2 --repetitions 1 --output "$OUT/nccl"
  run 280 train "${train[@]}" --ranks 2 --model 24x1024 --precision bf16-mixed \
    --runs collective+local_sort on_demand+local_sort on_demand+auto --minibatches 3 --repetitions 1 --output "$OUT/train"
  run 140 small "${train[@]}" --runs collective+local_sort on_demand+local_sort on_demand+auto --output "$OUT/small"
}

for part in "${@:-first}"; do
  case $part in
    first | tests | bench | train) "$part" ;;
    *)
      echo "usage: bash tests/gpu/session.sh [first|tests|bench|train]..." >&2
      exit 2
      ;;
  esac
done
cp docs/data/gpu-*.json docs/data/gpu-*.md "$OUT" 2>/dev/null
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}"; exit 1; }

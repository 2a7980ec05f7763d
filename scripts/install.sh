#!/usr/bin/env bash
# Install meshrl into a virtual environment: pinned versions, from wheels only, so that nothing is compiled.
#
#   scripts/install.sh [--cuda | --cpu] [--vllm | --sglang] [--dry-run]
#
#   --cuda     for NVIDIA GPUs; pins: requirements-cuda.txt
#   --cpu      for a machine without a GPU; pins: constraints.txt
#              With neither: --cuda where nvidia-smi is installed, else --cpu.
#   --vllm     vLLM too; with --cpu it is vLLM's CPU build; pins: requirements-vllm.txt
#   --sglang   SGLang too, in an environment of its own, because it needs another torch: set rollout.sglang.python to its
#              Python. With --cuda it has SGLang's own dependencies, never run on a GPU; with --cpu the packages and the
#              stand-ins (tests/sglang_cpu) that the tests use; pins: requirements-sglang.txt
#   --dry-run  print the commands and run none of them
#
# Environment variables: PYTHON is the interpreter, python3.11 or newer (default python3). VENV is the folder of the
# virtual environment (default .venv; with --cpu --vllm .venv-vllm, because that build needs other versions; with
# --sglang .venv-sglang).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { # fail MESSAGE
  echo "scripts/install.sh: $1" >&2
  exit 2
}

usage() { sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p;}' scripts/install.sh; }

device="" vllm="" sglang="" dry_run=""
for option in "$@"; do
  case "$option" in
    --cuda | --cpu)
      [ -z "$device" ] || [ "$device" = "${option#--}" ] || fail "--cuda and --cpu exclude each other; give one of them."
      device="${option#--}"
      ;;
    --vllm) vllm=vllm ;;
    --sglang) sglang=sglang ;;
    --dry-run) dry_run=yes ;;
    -h | --help)
      usage
      exit 0
      ;;
    *) fail "unknown option '$option'; allowed: --cuda, --cpu, --vllm, --sglang, --dry-run, --help." ;;
  esac
done
[ -z "$vllm$sglang" ] || [ "$vllm$sglang" = "${vllm:-$sglang}" ] ||
  fail "--vllm and --sglang exclude each other: they need different versions; call this script once for each."
if [ -z "$device" ]; then
  if command -v nvidia-smi >/dev/null; then device=cuda; else device=cpu; fi
fi
if [ "$device" = cuda ] && [ "$(uname -s)" != Linux ]; then
  fail "there are no CUDA builds for $(uname -s); use --cpu."
fi

PYTHON="${PYTHON:-python3}"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "meshrl needs Python 3.11 or newer; $PYTHON is: $("$PYTHON" -V 2>&1 || true). Name another one: PYTHON=python3.12 scripts/install.sh"
case "$device$vllm$sglang" in
  cpuvllm) default_venv=.venv-vllm ;;
  *sglang) default_venv=.venv-sglang ;;
  *) default_venv=.venv ;;
esac
venv="${VENV:-$default_venv}"

run() { # run COMMAND...: print it, and run it unless this is a dry run
  local word line=+
  for word in "$@"; do
    case "$word" in *' '*) line+=" \"$word\"" ;; *) line+=" $word" ;; esac
  done
  echo "$line"
  [ -n "$dry_run" ] || "$@"
}

wheels() { # wheels ARGUMENT...: pip install that refuses every package without a wheel
  run "$venv/bin/python" -m pip install --only-binary :all: "$@"
}

echo "Installing for $device${vllm:+ with vLLM}${sglang:+ with SGLang} into $venv"
[ -x "$venv/bin/python" ] || run "$PYTHON" -m venv "$venv"
# torch is installed first, with the same constraints as the rest, so that no dependency installs another version.
if [ "$device$sglang" = cudasglang ]; then
  wheels -r requirements.txt "$(grep ^sglang== requirements-sglang.txt)"
elif [ -n "$sglang" ]; then
  wheels -c constraints.txt torch
  wheels --no-deps -r requirements-sglang.txt
elif [ "$device" = cuda ]; then
  wheels -c requirements-cuda.txt torch
  wheels -c requirements-cuda.txt -r requirements.txt -r requirements-ray.txt $vllm
elif [ -n "$vllm" ]; then
  wheels -c constraints.txt torch
  wheels --no-deps -r requirements-vllm.txt
else
  wheels -c constraints.txt torch
  wheels -c constraints.txt -r requirements.txt -r requirements-ray.txt
fi
run "$venv/bin/python" -m pip install --no-deps --no-build-isolation -e .
[ "$device$sglang" != cpusglang ] ||
  run "$venv/bin/python" -c \
    "import pathlib, site; pathlib.Path(site.getsitepackages()[0], 'sglang_cpu.pth').write_text('$PWD/tests/sglang_cpu')"
run "$venv/bin/python" -c "import torch; print('torch', torch.__version__, 'CUDA', torch.version.cuda, 'GPUs', torch.cuda.device_count())"
echo "Next: source $venv/bin/activate; meshrl --help"

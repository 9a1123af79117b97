#!/usr/bin/env bash
# tools/transformers_4.sh FOLDER COMMAND...: run COMMAND with the newest transformers 4.x.
#
# FOLDER becomes an environment that holds transformers 4 and what it needs in other versions, and
# takes all else (torch above all) from the Python that is first on PATH. Made once, used again:
#
#     tools/transformers_4.sh /tmp/t4 python tools/try_transformers.py /tmp/t4.md
set -euo pipefail
folder=$1
shift
if ! "$folder/bin/python" -c 'import sys, transformers as t; sys.exit(t.__version__[:2] != "4.")' 2>&-; then
    python -m venv --clear "$folder"
    python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
        >"$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"
    "$folder/bin/python" -m pip install --quiet "transformers<5"
fi
root=$(cd "$(dirname "$0")/.." && pwd)
PATH="$folder/bin:$PATH" PYTHONPATH="$root:$root/cli:$root/stores${PYTHONPATH:+:$PYTHONPATH}" exec "$@"

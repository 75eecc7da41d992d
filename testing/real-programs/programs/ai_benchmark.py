"""The script of bench/ai-benchmark with small batches: which cases run."""

import contextlib
import io
import json
import os
import runpy
import sys

from report import say

script = os.path.join(os.path.dirname(__file__), "../../../bench/ai-benchmark/base/ai_benchmark.py")
sys.argv = [script, "--seconds", "0", "--least", "1", "--divide", "10", "--label", "share"]
output = io.StringIO()
with contextlib.redirect_stdout(output):
    runpy.run_path(script, run_name="__main__")
for line in output.getvalue().splitlines():
    if line.startswith("{") and "case" in line:
        found = json.loads(line)
        say(case=found["case"], result="rate" if found.get("rate", 0) > 0 else found.get("error"))
say(table=sum(line.startswith("| ") for line in output.getvalue().splitlines()) - 1)

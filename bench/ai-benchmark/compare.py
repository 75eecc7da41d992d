#!/usr/bin/env python3
"""Compares logs of ai_benchmark.py: one column for each file, named by its label or name."""

import json
import os
import sys

ORDER = ["whole", "share", "oversubscribed", "mps"]


def read(path):
    label, rates, names = os.path.basename(path), {}, {}
    with open(path) as log:
        for line in log:
            if not line.startswith("{"):
                continue
            found = json.loads(line)
            if "case" not in found:
                label = found.get("label") or label
                continue
            names[found["case"]] = f"{found['name']} {found.get('kind', '')}".strip()
            rates[found["case"]] = found.get("rate", found.get("error"))
    return label, rates, names


def main():
    if len(sys.argv) < 2:
        sys.exit("usage: compare.py LOG...")
    logs = sorted(map(read, sys.argv[1:]), key=lambda log: ORDER.index(log[0]) if log[0] in ORDER else len(ORDER))
    names = {case: name for _, _, of_log in logs for case, name in of_log.items()}
    if not names:
        sys.exit("no results in the logs")
    first = logs[0][1]
    print("| case | model | " + " | ".join(label for label, _, _ in logs) + " |")
    print("|---|---|" + "---|" * len(logs))
    for case, name in sorted(names.items()):
        cells = []
        for _, rates, _ in logs:
            rate, base = rates.get(case, "not run"), first.get(case)
            if isinstance(rate, float) and isinstance(base, float) and rates is not first and base > 0:
                cells.append(f"{rate:.1f} ({rate / base:.2f})")
            else:
                cells.append(f"{rate:.1f}" if isinstance(rate, float) else str(rate))
        print(f"| {case} | {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()

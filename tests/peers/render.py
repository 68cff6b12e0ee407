# SPDX-License-Identifier: Apache-2.0
"""What compare.py measured, as tables and as a picture; needs no GPU.

python tests/peers/render.py tests/peers/h100.json --plot tests/peers/h100.png
"""

import argparse
import json
import math

LABELS = {
    "ours": "cupy_awq",
    "marlin": "Marlin",
    "machete": "Machete",
    "fbgemm": "FBGEMM (bf16)",
    "recorded": "best of llm-awq, Humming, TurboMind (recorded)",
    "fp16": "cuBLAS fp16",
}
BANDS = ((1, 16), (32, 128), (256, 1024), (2048, 8192))


def mean(values):
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values))


def tables(rows):
    """Microseconds by shape and rows, in Markdown, and the geometric means by band of rows."""
    us = {(r["k"], r["n"], r["m"], r["peer"]): r["us"] for r in rows if r.get("ok", True)}
    shapes = list(dict.fromkeys((r["k"], r["n"]) for r in rows))
    ms = sorted({r["m"] for r in rows})
    lines, cells = [], {}
    for k, n in shapes:
        lines += [
            "",
            f"K = {k}, N = {n}",
            "",
            "| M | " + " | ".join(LABELS.values()) + " | roofline | ours / roofline | best peer / ours |",
        ]
        lines.append("|" + "---|" * (len(LABELS) + 4))
        for m in ms:
            times = {peer: us.get((k, n, m, peer)) for peer in LABELS}
            roof = us[k, n, m, "roof"]
            best = min(t for peer, t in times.items() if t and peer != "ours")
            best = min(best, us.get((k, n, m, "fp16_tn"), best))
            cells[k, n, m] = times["ours"] / roof, best / times["ours"]
            shown = [f"{t:.1f}" if t else "" for t in (*times.values(), roof)]
            lines.append(f"| {m} | " + " | ".join(shown) + " | {:.2f} | {:.2f} |".format(*cells[k, n, m]))
    head = ["| rows of x | ours / roofline | best peer of each cell / ours | worst cell |", "|---|---|---|---|"]
    for low, high in BANDS:
        some = [cells[cell] for cell in cells if low <= cell[2] <= high]
        if some:
            ratio, gain = (mean(pair[i] for pair in some) for i in (0, 1))
            head.append(f"| {low}-{high} | {ratio:.2f} | {gain:.2f} | {min(pair[1] for pair in some):.2f} |")
    return "\n".join(head + lines)


def plot(rows, gpu, path):
    """Geometric mean over the shapes of time over roofline, a line for each peer."""
    from matplotlib.figure import Figure

    roof = {(r["k"], r["n"], r["m"]): r["us"] for r in rows if r["peer"] == "roof"}
    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for peer, label in LABELS.items():
        ratios = {}
        for r in rows:
            if r["peer"] == peer and r["ok"]:
                ratios.setdefault(r["m"], []).append(r["us"] / roof[r["k"], r["n"], r["m"]])
        if ratios:
            ms = sorted(ratios)
            means = [math.exp(sum(map(math.log, ratios[m])) / len(ratios[m])) for m in ms]
            ours = peer == "ours"
            axes.plot(
                ms,
                means,
                marker="o",
                markersize=4,
                linewidth=2.5 if ours else 1.2,
                color="black" if ours else None,
                zorder=3 if ours else 2,
                label=label,
            )
    axes.axhline(1, color="gray", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    ticks = sorted({r["m"] for r in rows})
    axes.set_xticks(ticks, [str(m) for m in ticks], fontsize=8)
    axes.set_yticks([1, 1.5, 2, 3, 4, 6], ["1", "1.5", "2", "3", "4", "6"])
    axes.set_ylim(0.9, 7)
    axes.minorticks_off()
    axes.set_xlabel("M, rows of x")
    axes.set_ylabel("time / roofline, geometric mean over the shapes")
    axes.set_title(f"x @ W, W in AWQ INT4, group size 128, weights cold\n{gpu}", loc="left", fontsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="FILE.json")
    parser.add_argument("--plot", metavar="FILE.png")
    arguments = parser.parse_args()
    with open(arguments.file) as file:
        run = json.load(file)
    print(tables(run["rows"]))
    if arguments.plot:
        plot(run["rows"], run["gpu"], arguments.plot)


if __name__ == "__main__":
    main()

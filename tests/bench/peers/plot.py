#!/usr/bin/env python3
"""plot.py peers.json out.svg: times of verify_attention and its peers over the context, both axes logarithmic."""
import json
import math
import sys

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 420, 70, 50, 20, 190
COLORS = {1: "#4477aa", 8: "#228833", 16: "#ccbb44", 32: "#ee6677", 64: "#aa3377"}

DASHES = {"extend": ' stroke-dasharray="6 3"', "decode": ' stroke-dasharray="2 2"', "fa2": ' stroke-dasharray="8 2 2 2"',
          "fa3": ' stroke-dasharray="8 2 2 2 2 2"'}


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        data = json.load(file)
    series = {}
    for r in data["results"]:
        series.setdefault((r["peer"], r["rows"]), []).append((r["context"], r["us"]))
        if r["ours_us"]:
            series.setdefault(("ours", r["rows"]), []).append((r["context"], r["ours_us"]))
    contexts = sorted({c for points in series.values() for c, _ in points})
    times = [t for points in series.values() for _, t in points]
    low, high = 10 ** math.floor(math.log10(min(times))), 10 ** math.ceil(math.log10(max(times)))

    def x(context):
        span = math.log(contexts[-1] / contexts[0])
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(context / contexts[0]) / span

    def y(time):
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * math.log(time / low) / math.log(high / low)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
           '<rect width="100%" height="100%" fill="white"/>']
    tick = low
    while tick <= high:
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#ddd"/>'
                   f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g} us</text>')
        tick *= 10
    for context in contexts:
        out.append(f'<text x="{x(context):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{context}</text>')
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">context (tokens), {data["device"]}</text>')
    for i, ((name, rows), points) in enumerate(sorted(series.items())):
        dash = DASHES.get(name, "")
        color = COLORS.get(rows, "#000")
        line = " ".join(f"{x(c):.1f},{y(t):.1f}" for c, t in sorted(set(points)))
        out.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')
        at = TOP + 18 * i + 10
        out.append(f'<line x1="{WIDTH - RIGHT + 15}" x2="{WIDTH - RIGHT + 45}" y1="{at}" y2="{at}" stroke="{color}" stroke-width="2"{dash}/>'
                   f'<text x="{WIDTH - RIGHT + 52}" y="{at + 4}">{name}, {rows} row{"s" if rows > 1 else ""}</text>')
    out.append("</svg>")
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        file.write("\n".join(out) + "\n")


if __name__ == "__main__":
    main()

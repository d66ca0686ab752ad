#!/usr/bin/env python3
"""Draws both dashboards from a live group of eight ranks, one of which is slowed on purpose, for docs/images.

usage: render.py BIN_DIR PROMETHEUS_DIR OUT_DIR [--model DIR] [--drafter DIR] [--seconds N]
Needs matplotlib. Grafana itself is not needed: each panel's queries go to Prometheus, with the panel's place, unit,
stacking and legend taken from the dashboard.
"""
import argparse
import contextlib
import json
import math
import os
import pathlib
import re
import signal
import threading
import time

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

import live_group  # noqa: E402

SLOW_RANK = 3
STOPPED_MS, RUNNING_MS = 20, 5
RATE_INTERVAL = "10s"
STEP = 1  # seconds between points
COLUMN_INCHES, ROW_INCHES = 0.8, 0.32
COLORS = ["#3274d9", "#e0752d", "#5aa64b", "#c4162a", "#8f5fbf", "#b8860b", "#e377a2", "#3f9f9f", "#777777"]


def scaled(value, unit):
    """How Grafana writes a value of this unit, shortly."""
    if math.isnan(value):
        return ""
    if unit == "percentunit":
        return f"{100 * value:.3g}%"
    if unit == "s":
        for factor, name in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
            if abs(value) >= factor or name == "µs":
                return f"{value / factor:.3g} {name}" if value else "0"
    suffix = {"bytes": "B", "Bps": "B/s"}.get(unit, "")
    for factor, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {name}{suffix}"
    return f"{value:.3g} {suffix}".strip()


def legend(template, metric):
    return re.sub(r"\{\{(\w+)\}\}", lambda match: metric.get(match[1], ""), template.replace("__auto", ""))


class Panel:
    def __init__(self, figure, panel, place, prometheus, times, slowed, variables):
        self.panel, self.prometheus, self.times, self.variables = panel, prometheus, times, variables
        self.slowed = slowed - times[1]
        self.unit = panel["fieldConfig"]["defaults"]["unit"]
        overrides = panel["fieldConfig"]["overrides"]
        self.grey = overrides[0]["matcher"]["options"] if overrides else None
        self.axes = figure.add_axes(place)
        title = live_group.with_variables(panel["title"], **variables)
        self.axes.set_title(title, fontsize=8.5, loc="left", fontweight="bold", pad=4)
        for side in ("top", "right"):
            self.axes.spines[side].set_visible(False)
        self.axes.tick_params(labelsize=7)
        if not {"timeseries": self.lines, "stat": self.stat, "bargauge": self.bars, "table": self.table}[panel["type"]]():
            self.axes.clear()
            self.text("GPU only: no data on the CPU backend", 8, "#888888")
            self.axes.set_title(title, fontsize=8.5, loc="left", fontweight="bold", pad=4)

    def expression(self, target, interval=RATE_INTERVAL):
        return live_group.with_variables(target["expr"], __rate_interval=interval, **self.variables)

    def series(self):
        for target in self.panel["targets"]:
            start, end = self.times
            for found in self.prometheus.query_range(self.expression(target), start, end, STEP):
                points = [(float(at) - end, float(value)) for at, value in found["values"]]
                yield legend(target["legendFormat"], found["metric"]), points

    def instant(self):
        # Over the whole run where Grafana takes what is in view.
        interval = f"{int(self.times[1] - self.times[0])}s"
        for target in self.panel["targets"]:
            for found in self.prometheus.query(self.expression(target, interval)):
                yield legend(target["legendFormat"], found["metric"]), found["metric"], float(found["value"][1])

    def text(self, text, size, color="black"):
        self.axes.axis("off")
        self.axes.text(0.5, 0.45, text, ha="center", va="center", fontsize=size, color=color, transform=self.axes.transAxes)

    def lines(self):
        found = sorted(self.series(), key=lambda item: [int(w) if w.isdigit() else w for w in re.split(r"(\d+)", item[0])])
        if not found:
            return False
        found.sort(key=lambda item: item[0] == self.grey)
        defaults = self.panel["fieldConfig"]["defaults"]
        if "stacking" in defaults["custom"]:
            grid = sorted({at for _, points in found for at, _ in points})
            rows = [[dict(points).get(at, 0) for at in grid] for _, points in found]
            colors = [COLORS[i] if name != self.grey else "#c0c0c0" for i, (name, _) in enumerate(found)]
            self.axes.stackplot(grid, rows, labels=[name for name, _ in found], colors=colors, alpha=0.85)
        else:
            for (name, points), color in zip(found, COLORS * 9):
                self.axes.plot(*zip(*points), label=name, color=color, linewidth=1.1)
        self.axes.set_xlim(self.times[0] - self.times[1], 0)
        low, high = self.axes.get_ylim()
        low = defaults.get("min", low)
        self.axes.set_ylim(low, defaults.get("max", 1.05 * high if high > low else low + 1))
        self.axes.yaxis.set_major_formatter(lambda value, _: scaled(value, self.unit))
        self.axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f} s" if value else "now")
        self.axes.grid(axis="y", linewidth=0.3)
        self.axes.axvline(self.slowed, color="#888888", linewidth=1.2)
        names = [name for name, _ in found if name]
        if names:
            self.axes.legend(fontsize=6.3, ncols=4 if len(names) < 9 else 6, loc="upper left", bbox_to_anchor=(-0.02, -0.13),
                             frameon=False, handlelength=1, columnspacing=0.9, labelspacing=0.2, handletextpad=0.4)
        return True

    def stat(self):
        found = list(self.instant())
        if found:
            self.text(scaled(found[0][2], self.unit), 19, COLORS[0])
        return bool(found)

    def bars(self):
        found = list(self.instant())
        names, values = [name for name, _, _ in found], [value for _, _, value in found]
        self.axes.barh(names, values, color=COLORS[0])
        self.axes.invert_yaxis()
        self.axes.set_xlim(0, self.panel["fieldConfig"]["defaults"].get("max"))
        self.axes.xaxis.set_major_formatter(lambda value, _: scaled(value, self.unit))
        return bool(found)

    def table(self):
        rows = [metric for _, metric, _ in self.instant()]
        columns = sorted({key for row in rows for key in row} - {"__name__", "job"})
        rows.sort(key=lambda row: row.get("rank", ""))
        self.axes.axis("off")
        table = self.axes.table([[row.get(key, "") for key in columns] for row in rows], colLabels=columns, loc="center")
        table.auto_set_font_size(False)
        table.set_fontsize(7.5)
        return bool(rows)


def expanded(panels, ranks):
    """The panels with repeated ones written out: (panel, x, y, variables)."""
    shift = 0
    for panel in panels:
        at = panel["gridPos"]
        if panel.get("repeat") != "rank":
            yield panel, at["x"], at["y"] + shift, {}
            continue
        a_row = panel["maxPerRow"]
        for i in range(ranks):
            yield panel, at["w"] * (i % a_row), at["y"] + shift + at["h"] * (i // a_row), {"rank": str(i)}
        shift += at["h"] * ((ranks - 1) // a_row)


def draw(dashboard, path, prometheus, times, slowed, ranks):
    panels = list(expanded(dashboard["panels"], ranks))
    rows = max(y + panel["gridPos"]["h"] for panel, _, y, _ in panels) + 2
    figure = plt.figure(figsize=(24 * COLUMN_INCHES, rows * ROW_INCHES), dpi=90)
    figure.text(0.012, 1 - 1 / rows, dashboard["title"], fontsize=14, fontweight="bold", va="center")
    figure.text(0.3, 1 - 1 / rows, f"grey line: from here on rank {SLOW_RANK} is stopped for {STOPPED_MS} of every "
                f"{STOPPED_MS + RUNNING_MS} ms", fontsize=9, va="center")
    for panel, x, y, variables in panels:
        width, height, y = panel["gridPos"]["w"], panel["gridPos"]["h"], y + 2
        if panel["type"] == "row":
            figure.text(0.012, 1 - (y + 0.5) / rows, panel["title"], fontsize=11, color="#3274d9", va="center")
            continue
        # Room for the title above, and for the axis and the legend below.
        top, bottom = 1.1, 1.9 if panel["type"] == "timeseries" else 1.0
        left, right = (1.5 if panel["type"] == "bargauge" else 1.1), 0.3
        place = ((x + left) / 24, 1 - (y + height - bottom) / rows, (width - left - right) / 24, (height - top - bottom) / rows)
        Panel(figure, panel, place, prometheus, times, slowed, variables)
    figure.savefig(path)
    plt.close(figure)


def slow_down(pid, ended):
    """Stops the process for most of the time until told."""
    with contextlib.suppress(ProcessLookupError):
        while not ended.wait(RUNNING_MS / 1000):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(STOPPED_MS / 1000)
            os.kill(pid, signal.SIGCONT)


def main():
    goldens = live_group.SOURCE / "tests/goldens"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("bin_dir", "prometheus_dir", "out_dir"):
        parser.add_argument(name)
    parser.add_argument("--model", default=goldens / "model")
    parser.add_argument("--drafter", default=goldens / "drafter")
    parser.add_argument("--seconds", type=int, default=100, help="length of the run; the rank is slow in its second half")
    parser.add_argument("--flag", action="append", default=[], help="more flags of kdt-launch")
    parser.add_argument("--load", action="append", default=[], help="more flags of kdt bench")
    options = parser.parse_args()
    out = pathlib.Path(options.out_dir)
    with live_group.live_group(options.bin_dir, f"{options.prometheus_dir}/prometheus", options.model, options.drafter, 8,
                               options.flag) as (group, prometheus):
        load = group.load(1000000, 6, options.load)
        ended = threading.Event()
        slow = threading.Thread(target=slow_down, args=(group.worker_pid(SLOW_RANK), ended))
        try:
            time.sleep(options.seconds / 2 + 10)
            slow.start()
            slowed = time.time()
            time.sleep(options.seconds / 2)
            now = time.time()
            times = (now - options.seconds, now)
            for path in sorted((live_group.SOURCE / "deploy/grafana").glob("*.json")):
                draw(json.loads(path.read_text()), out / f"dashboard-{path.stem}.png", prometheus, times, slowed, group.tp)
        finally:
            ended.set()
            if slow.ident is not None:
                slow.join()
            live_group.stop(load)


if __name__ == "__main__":
    main()

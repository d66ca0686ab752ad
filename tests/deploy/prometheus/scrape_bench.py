#!/usr/bin/env python3
"""What a scrape costs: its latency with a loaded group, its processor time, and what it does to the steps.

usage: scrape_bench.py BIN_DIR [TP]
"""
import http.client
import os
import pathlib
import re
import statistics
import sys
import tempfile
import threading
import time

import live_group

FAST_HZ = 20  # scrapes a second of every process where the steps are compared; the effect of 1 Hz is this much less
WINDOWS, WINDOW_SECONDS = 8, 2


def scrape(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    begin = time.perf_counter()
    connection.request("GET", "/metrics")
    text = connection.getresponse().read()
    seconds = time.perf_counter() - begin
    connection.close()
    return seconds, text.decode()


def processor_seconds(pid):
    """Of all threads, exited ones included."""
    words = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def value(text, name):
    return float(re.search(rf"^{name} (\S+)$", text, re.MULTILINE)[1])


def step_times(group):
    """Mean step time of windows with fast scrapes and of windows without, taking turns."""
    means = {True: [], False: []}
    for window in range(2 * WINDOWS):
        fast = window % 2 == 1
        ended = threading.Event()

        def scraper():
            while not ended.wait(1 / FAST_HZ):
                for port in group.ports():
                    scrape(port)

        thread = threading.Thread(target=scraper)
        _, before = scrape(group.coordinator_port)
        if fast:
            thread.start()
        time.sleep(WINDOW_SECONDS)
        _, after = scrape(group.coordinator_port)
        ended.set()
        if fast:
            thread.join()
        seconds, count = (value(after, f"kdt_step_seconds_{part}") - value(before, f"kdt_step_seconds_{part}")
                          for part in ("sum", "count"))
        means[fast].append(seconds / count)
    return statistics.median(means[False]), statistics.median(means[True])


def main():
    goldens = live_group.SOURCE / "tests/goldens"
    tp = int(sys.argv[2]) if len(sys.argv) > 2 else 8
    with tempfile.TemporaryDirectory() as folder:
        group = live_group.Group(pathlib.Path(folder), sys.argv[1], goldens / "model", goldens / "drafter", tp, ["--budget=8"])
        try:
            load = group.load(1000000, 4)
            time.sleep(2)
            print(f"{tp} ranks, 4 requests at once, {os.cpu_count()} cores")
            parts = (("coordinator", group.coordinator_port), ("worker 0", group.worker_ports[0]))
            for name, port in parts:
                times, size = [], 0
                for _ in range(200):
                    seconds, text = scrape(port)
                    times.append(seconds * 1e3)
                    size = len(text)
                    time.sleep(0.01)
                times.sort()
                print(f"{name}: {size} bytes; under load p50 {times[100]:.2f} ms, p99 {times[197]:.2f} ms, most {times[-1]:.2f} ms")
            without, fast = step_times(group)
            print(f"step: {without * 1e3:.3f} ms without scrapes, {fast * 1e3:.3f} ms with {FAST_HZ} a second of every process: "
                  f"{(fast / without - 1) * 100 / FAST_HZ:+.2f}% a scrape a second")
            live_group.stop(load)
            time.sleep(1)
            count = 1000
            for (name, port), pid in zip(parts, (coordinator_pid(group), group.worker_pid(0))):
                before = processor_seconds(pid)
                times = sorted(scrape(port)[0] * 1e3 for _ in range(count))
                cost = (processor_seconds(pid) - before) / count
                print(f"{name}: idle p50 {times[count // 2]:.2f} ms; processor time {cost * 1e3:.3f} ms a scrape: "
                      f"{cost * 100:.3f}% of a core at one a second")
        finally:
            live_group.stop(group.process)


def coordinator_pid(group):
    children = pathlib.Path(f"/proc/{group.process.pid}/task/{group.process.pid}/children").read_text().split()
    return next(int(pid) for pid in children if "kdt-coordinator" in pathlib.Path(f"/proc/{pid}/cmdline").read_text())


if __name__ == "__main__":
    main()
